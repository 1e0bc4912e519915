"""Everything a run reports: metrics.jsonl, sampled texts, boards, and a view worth watching."""
