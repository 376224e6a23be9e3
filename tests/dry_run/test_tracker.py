from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from llmscale.dry_run.tracker import Category, MemoryTracker

KIB = 1024


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(("asked", "counted"), [(1, 512), (512, 512), (513, 1024), (0, 0)])
def test_a_storage_counts_in_blocks_of_512_bytes(fake: None, asked: int, counted: int) -> None:
    with MemoryTracker() as tracker:
        tensor = empty(asked)
        assert tracker.live.total_bytes == counted
        del tensor
        assert tracker.live.total_bytes == 0


def test_views_share_a_storage_and_hold_it(fake: None) -> None:
    with MemoryTracker() as tracker:
        tensor = empty(4 * KIB)
        view = tensor.view(2, -1)[0]
        assert tracker.live.total_bytes == 4 * KIB
        del tensor
        assert tracker.live.total_bytes == 4 * KIB
        del view
        assert tracker.live.total_bytes == 0


def test_an_operator_in_place_makes_nothing(fake: None) -> None:
    with MemoryTracker() as tracker:
        tensor = empty(KIB)
        tensor.add_(1)
        assert tracker.live.total_bytes == KIB


def test_what_autograd_saves_is_alive_until_the_backward_pass(fake: None) -> None:
    with MemoryTracker() as tracker:
        leaf = torch.empty(256, requires_grad=True)
        result = leaf.exp().sum()
        assert tracker.live.total_bytes == 3 * KIB - 512  # leaf, its exponential, a scalar
        result.backward()
        del result
        gc.collect()
        assert tracker.live.total_bytes == 2 * KIB  # leaf and gradient


def test_assigning_data_frees_what_was_there(fake: None) -> None:
    with MemoryTracker() as tracker:
        tensor = empty(8 * KIB)
        tensor.data = empty(KIB)
        assert tracker.live.total_bytes == KIB


def test_a_resized_storage_counts_anew(fake: None) -> None:
    with MemoryTracker() as tracker:
        tensor = empty(KIB)
        tensor.resize_(3 * KIB)
        assert tracker.live.total_bytes == 3 * KIB


def test_a_phase_gives_new_storages_their_category_and_has_a_peak(fake: None) -> None:
    with MemoryTracker() as tracker:
        with tracker.phase("build", Category.PARAMETERS):
            weight = empty(2 * KIB)
        with tracker.phase("forward", Category.ACTIVATIONS):
            saved, dropped = empty(KIB), empty(4 * KIB)
            del dropped
        assert (tracker.live.parameters_bytes, tracker.live.activations_bytes) == (2 * KIB, KIB)
        assert tracker.peaks()["build"].total_bytes == 2 * KIB
        assert tracker.peaks()["forward"].activations_bytes == 5 * KIB
        assert tracker.peaks()["forward"].total_bytes == 7 * KIB
        del weight, saved


def test_the_peak_of_a_phase_that_allocates_nothing_is_what_it_found(fake: None) -> None:
    with MemoryTracker() as tracker:
        tensor = empty(KIB)
        with tracker.phase("quiet", Category.TEMPORARIES):
            del tensor
        assert tracker.peaks()["quiet"].total_bytes == KIB


def test_a_restart_forgets_peaks_and_keeps_what_is_alive(fake: None) -> None:
    with MemoryTracker() as tracker:
        tensor = empty(KIB)
        empty(8 * KIB)
        tracker.restart()
        assert tracker.peaks() == {}
        assert tracker.live.total_bytes == KIB
        with tracker.phase("after", Category.TEMPORARIES):
            assert tracker.peaks()["after"].total_bytes == KIB
        del tensor


def test_a_storage_can_be_moved_to_another_category(fake: None) -> None:
    with MemoryTracker() as tracker, tracker.phase("backward", Category.TEMPORARIES):
        gradient = empty(KIB)
        tracker.assign([gradient.view(-1)], Category.GRADIENTS)
        assert (tracker.live.temporaries_bytes, tracker.live.gradients_bytes) == (0, KIB)
        del gradient
        assert tracker.live.gradients_bytes == 0
        # It counts in its latest category all the time.
        assert tracker.peaks()["backward"].gradients_bytes == KIB
        assert tracker.peaks(Category.GRADIENTS)["backward"].total_bytes == 0


def test_what_was_there_before_counts_once_it_is_assigned(fake: None) -> None:
    early = empty(KIB)
    with MemoryTracker() as tracker:
        tracker.assign([early, early.view(2, -1)], Category.OPTIMIZER)
        assert tracker.live.optimizer_bytes == tracker.live.total_bytes == KIB
        del early
        assert tracker.live.total_bytes == 0


def test_the_first_tensor_can_tell_the_category(fake: None) -> None:
    def classify(tensor: torch.Tensor, operator: object, arguments: object) -> Category | None:
        return Category.LOGITS if tensor.shape[-1] == 1000 else None

    with MemoryTracker(classify=classify) as tracker, tracker.phase("forward", Category.ACTIVATIONS):
        remaining = torch.empty(2, 1000, dtype=torch.uint8), empty(KIB)
        assert (tracker.live.logits_bytes, tracker.live.activations_bytes) == (2 * KIB, KIB)
        del remaining


def test_work_space_counts_beside_the_result_and_only_while_the_operator_runs(fake: None) -> None:
    def workspace(func: torch._ops.OpOverload, args: tuple[object, ...]) -> tuple[int, ...]:
        return (3000, 10) if func is torch.ops.aten.exp.default else ()

    with MemoryTracker(workspace=workspace) as tracker:
        with tracker.phase("forward", Category.ACTIVATIONS):
            tensor = torch.empty(256)
            result = tensor.exp()
            assert tracker.live.total_bytes == 2 * KIB
        peak = tracker.peaks()["forward"]
        assert (peak.activations_bytes, peak.temporaries_bytes) == (2 * KIB, 3 * KIB + 512)
        del tensor, result
        assert tracker.live.total_bytes == 0


def test_another_device_is_counted_apart(fake: None) -> None:
    with MemoryTracker(device=torch.device("cpu", 1)) as tracker:
        on_host = torch.empty(100, dtype=torch.uint8)
        assert (tracker.live.total_bytes, tracker.elsewhere_bytes) == (0, 100)
        del on_host
        assert tracker.elsewhere_bytes == 0


@pytest.mark.parametrize(
    ("dtype", "answer"), [(torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.long, 0), (torch.bool, False)]
)
def test_values_that_do_not_exist_are_zero(fake: None, dtype: torch.dtype, answer: object) -> None:
    with MemoryTracker():
        value = torch.empty((), dtype=dtype).item()
        assert value == answer
        assert type(value) is type(answer)
        assert torch.equal(empty(3), empty(3))
