"""Rows come back as they were saved, however the ranks that saved them had cut them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vipfast.learn.saved_shards import SavedShards


@settings(deadline=None)
@given(num_rows=st.integers(1, 9), saved_by=st.integers(1, 5), read_by=st.integers(1, 12))
def test_any_number_of_ranks_reads_what_any_other_saved(tmp_path_factory, num_rows, saved_by, read_by):
    folder = tmp_path_factory.mktemp("shards")
    whole = {"0.exp_avg": torch.arange(3.0 * num_rows).view(num_rows, 3), "7.exp_avg_sq": torch.arange(num_rows).double()}
    files = [folder / f"{rank}.safetensors" for rank in range(saved_by)]
    for rank, file in enumerate(files):
        save_file({name: own for name, x in whole.items() for own in x.chunk(saved_by)[rank : rank + 1]}, file)
    saved = SavedShards(files)
    assert saved.names == set(whole)
    size = -(-num_rows // read_by)
    for name, x in whole.items():
        parts = [saved.rows(name, min(r * size, num_rows), min((r + 1) * size, num_rows)) for r in range(read_by)]
        assert torch.equal(torch.cat(parts), x) and {part.dtype for part in parts} == {x.dtype}
        assert all(part.shape[1:] == x.shape[1:] for part in parts)
