"""Where prompts and their verifiers come from; ``load_task`` turns any of them into one Task."""
