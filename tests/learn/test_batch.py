import numpy as np
import torch
from ragged_steps import configured, sampled, tiny

from vipfast.learn.batch import ALIGNMENT, StepTensors, upload
from vipfast.learn.pack import blank, pack
from vipfast.learn.trainable import Trainable

CPU = torch.device("cpu")
INDICES = ("input_ids", "positions_T", "targets_T", "tokens_T", "rows_r", "token_offsets")


def test_passes_go_over_in_one_aligned_buffer():
    step = sampled(tiny())
    rows_r = np.flatnonzero(step.lengths_R > 0)
    passes = [*pack(step, rows_r, 40, 36), *pack(step, rows_r, 60, 36, "varlen"), blank(36)]
    batches = upload(passes, CPU)
    columns = [getattr(batch, name) for batch in batches for name in INDICES if getattr(batch, name).numel()]
    assert len(passes) > 6 and len({column.untyped_storage().data_ptr() for column in columns}) == 1
    assert all(column.storage_offset() % ALIGNMENT == 0 and column.is_contiguous() for column in columns)
    for part, batch in zip(passes, batches, strict=True):
        assert all(np.array_equal(getattr(part, name), getattr(batch, name).numpy()) for name in INDICES)
        assert (batch.row_offsets is None) == (batch.position_ids is None) == (part.row_offsets is None)


def test_positions_start_anew_with_every_packed_row():
    step = sampled(tiny(), counts=[3], lengths=[5, 1, 2])
    (part,) = pack(step, np.arange(3), 99, 36, "varlen")
    (batch,) = upload([part], CPU)
    P = len(step.prompt_tokens)
    lengths = [P + 4, P, P + 1]
    assert batch.position_ids.tolist() == [[k for length in lengths for k in range(length)]]
    assert batch.row_offsets.tolist() == [0, P + 4, 2 * P + 4, 3 * P + 5] and batch.row_offsets.dtype == torch.int32
    assert batch.longest == P + 4


def test_step_tensors_are_the_steps_own():
    step = sampled(tiny())
    data = Trainable.of(step, configured())
    tensors = StepTensors.of(data, CPU)
    assert torch.equal(tensors.use_R, torch.from_numpy(step.plan.use_R)) and tensors.baseline_B.isnan().all()
    at = np.array([3, 7])
    (batch,) = upload([pack(step, np.array([0]), 99, 36)[0]], CPU)
    arguments = tensors.loss_arguments(batch._replace(tokens_T=torch.from_numpy(at)), None, configured())
    assert np.array_equal(arguments["sampler_logp_T"].numpy(), step.sampler_logp[at]) and arguments["old_logp_T"] is None
