"""An allocator whose rounds are decided on rank 0 and told to the others."""

from collections.abc import Callable, Generator

from vipfast.allocate.base import Allocator, Counts
from vipfast.distributed import Ranks
from vipfast.types import PromptBatch, StepPlan, Tally


class Led:
    """Behaves on every rank as the allocator that rank 0 alone has: predictor, embeddings and plan are made once.

    Args:
        make: makes the allocator; called on rank 0.
        ranks: all must make this object, and all step through ``rounds`` alike.

    Raises:
        UsageError: what ``make`` raises.
    """

    def __init__(self, make: Callable[[], Allocator], ranks: Ranks):
        self.ranks, self.allocator = ranks, None

        def traits() -> tuple[str, bool, str]:
            self.allocator = make()
            return self.allocator.name, self.allocator.barrier, self.allocator.budget_kind

        self.name, self.barrier, self.budget_kind = ranks.decided(traits)
        assert self.barrier, "rounds that do not wait are not led (see apart.py)"

    def rounds(self, prompts: PromptBatch, budget: int) -> Generator[Counts, Tally, StepPlan]:
        """See ``vipfast.allocate.base.Allocator``; a batch that rank 0 lets grow grows on every rank."""
        rounds = self.allocator.rounds(prompts, budget) if self.allocator else None
        tally = None

        def advance() -> tuple[Counts | None, StepPlan | None, int]:
            try:
                return rounds.send(tally), None, len(prompts)
            except StopIteration as stop:
                return None, stop.value, len(prompts)

        while True:
            counts_B, plan, num_prompts = self.ranks.decided(advance)
            if num_prompts > len(prompts):
                prompts.more(num_prompts - len(prompts))
            if plan is not None:
                return plan
            tally = yield counts_B

    def learn(self, tally: Tally) -> dict[str, float | None]:
        """On rank 0; its metrics are told to all."""
        return self.ranks.decided(lambda: self.allocator.learn(tally))

    def state_dict(self) -> dict:
        """The allocator's on rank 0, which saves it; empty elsewhere."""
        return self.allocator.state_dict() if self.allocator else {}

    def load_state_dict(self, state: dict) -> None:
        """Raises: CheckpointError where the state is another predictor's."""
        self.ranks.decided(lambda: self.allocator.load_state_dict(state))
