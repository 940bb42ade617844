"""The rules alone, over records made by hand."""

from pathlib import Path

import pytest

from headwater.checkpoint.foreign.record import ByteRange, Contents, Role, StoredChunk
from headwater.checkpoint.freshness import Repeat, Verdict, judge, pair_up

CHANGED, SAME, SAME_ZEROS = Repeat(False, False), Repeat(True, True), Repeat(True, False)


def chunk(
    role: Role, offset: int = 0, dtype: str = "F32", parameter: str = "w", component: str = "policy"
) -> StoredChunk:
    key = parameter if role == "weight" else f"optimizer.state.{role}.{parameter}"
    return StoredChunk(component, role, parameter, key, (offset,), (4,), dtype, ByteRange(Path("x"), 0, 16))


def verdict(
    repeats: dict[StoredChunk, Repeat],
    steps: tuple[float, float] | None = (1, 2),
    group_steps: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    still: tuple[str, ...] = (),
    new_only: tuple[StoredChunk, ...] = (),
    old_only: tuple[StoredChunk, ...] = (),
) -> Verdict:
    """steps: of every parameter with state, before and after; those in `still` keep theirs."""
    with_state = {(c.component, c.parameter) for c in repeats if c.role != "weight"}
    contents = []
    for side, only in ((0, old_only), (1, new_only)):
        own = {key: steps[0 if key[1] in still else side] for key in with_state} if steps else {}
        groups = {"policy": group_steps[side]} if group_steps else {}
        contents.append(Contents(Path("f"), "test", (*repeats, *only), own, groups))
    old, new = contents
    by_place = {c.place: found for c, found in repeats.items()}
    assert {pair.new.place for pair in pair_up(old, new)} == set(by_place)
    return judge(old, new, by_place)


def stale(found: Verdict) -> list[tuple[str, int]]:
    return [(chunk.role, chunk.offset[0] if chunk.offset else 0) for chunk in found.stale]


def test_one_repeated_fp32_moment_chunk_among_changed_ones_is_stale():
    found = verdict({chunk("exp_avg", 0): CHANGED, chunk("exp_avg", 4): SAME, chunk("exp_avg_sq"): CHANGED})
    assert (found.exit_code, stale(found)) == (1, [("exp_avg", 4)])
    assert found.reasons == (
        "policy: exp_avg repeated although its step went from 1 to 2 (1 chunk): optimizer.state.exp_avg.w [4]",
    )


def test_an_fp32_moment_of_which_a_part_repeats_is_stale_if_its_step_advanced():
    in_part = Repeat(False, False, in_part=True)
    found = verdict({chunk("exp_avg", 0): CHANGED, chunk("exp_avg_sq", 4): in_part})
    assert (found.exit_code, stale(found)) == (1, [("exp_avg_sq", 4)])
    assert "repeated in part although its step went from 1 to 2" in found.reasons[0]


def test_boxes_of_a_parameter_that_no_gradient_met_are_idle_one_by_one():
    boxes = {chunk(role, at): SAME_ZEROS if at == 4 else CHANGED for role in ("exp_avg", "exp_avg_sq") for at in (0, 4)}
    found = verdict({**boxes, chunk("exp_avg", 8): SAME_ZEROS, chunk("exp_avg_sq", 8): CHANGED})
    assert (found.exit_code, found.components[0].idle) == (0, ("w [4]",))


def test_a_repeated_weight_is_frozen_only_where_others_have_state_of_their_own():
    weights = {chunk("weight"): CHANGED, chunk("weight", parameter="v"): SAME}
    assert verdict({**weights, chunk("exp_avg"): CHANGED}).components[0].frozen == ("v",)
    assert verdict({**weights, chunk("exp_avg", parameter="bucket"): CHANGED}).components[0].frozen == ()


def test_a_moment_without_live_numbers_that_repeats_is_no_evidence():
    found = verdict({chunk("exp_avg", 0): CHANGED, chunk("exp_avg", 4): SAME_ZEROS})
    assert (found.exit_code, stale(found)) == (0, [])


def test_one_repeated_bf16_moment_chunk_is_no_fault_but_the_whole_tensor_is():
    a, b = chunk("exp_avg", 0, "BF16"), chunk("exp_avg", 4, "BF16")
    assert verdict({a: SAME, b: CHANGED}).exit_code == 0
    found = verdict({a: SAME, b: SAME, chunk("exp_avg_sq"): CHANGED})
    assert (found.exit_code, stale(found)) == (1, [("exp_avg", 0), ("exp_avg", 4)])


def test_one_repeated_master_chunk_is_no_fault_but_the_whole_tensor_is():
    a, b, moment = chunk("param", 0), chunk("param", 4), chunk("exp_avg")
    assert verdict({a: SAME, b: CHANGED, moment: CHANGED}).exit_code == 0
    assert stale(verdict({a: SAME, b: SAME, moment: CHANGED})) == [("param", 0), ("param", 4)]


def test_the_master_of_a_parameter_with_zero_moments_is_idle():
    touched = chunk("exp_avg", parameter="other")
    found = verdict({chunk("param"): SAME, chunk("exp_avg"): SAME_ZEROS, touched: CHANGED})
    assert (found.exit_code, found.components[0].idle) == (0, ("w",))


def test_one_repeated_weight_is_no_fault_but_all_are():
    a, b, moment = chunk("weight", dtype="BF16"), chunk("weight", dtype="BF16", parameter="v"), chunk("exp_avg")
    assert verdict({a: SAME, b: CHANGED, moment: CHANGED}).exit_code == 0
    assert stale(verdict({a: SAME, b: SAME, moment: CHANGED})) == [("weight", 0), ("weight", 0)]


def test_a_parameter_whose_step_repeats_is_idle_beside_one_that_advanced():
    found = verdict({chunk("exp_avg"): SAME, chunk("exp_avg", parameter="v"): CHANGED}, still=("w",))
    assert (found.exit_code, found.components[0].idle) == (0, ("w",))


def test_an_idle_component_is_fine_if_another_advanced_and_stale_if_none_did():
    policy = {chunk("exp_avg", parameter="p"): SAME, chunk("weight", parameter="p"): SAME}
    value = chunk("exp_avg", component="value")
    found = verdict({**policy, value: CHANGED}, still=("p",))
    assert found.exit_code == 0
    assert [(report.component, report.state) for report in found.components] == [
        ("policy", "idle"),
        ("value", "advanced"),
    ]
    none = verdict({**policy, value: SAME}, still=("p", "w"))
    assert none.exit_code == 1
    assert {(c.component, c.role) for c in none.stale} == {
        ("policy", "exp_avg"),
        ("policy", "weight"),
        ("value", "exp_avg"),
    }


def test_a_step_that_repeats_under_moments_that_moved_is_stale_itself():
    found = verdict({chunk("exp_avg"): CHANGED, chunk("exp_avg", parameter="v"): CHANGED}, still=("w",))
    assert (found.exit_code, stale(found)) == (1, [("step", 0)])


@pytest.mark.parametrize("moved", ["weight", "param"])
def test_moments_that_repeat_with_their_step_are_stale_if_the_parameter_moved(moved: Role):
    found = verdict({chunk("exp_avg"): SAME, chunk("exp_avg_sq"): SAME_ZEROS, chunk(moved): CHANGED}, still=("w",))
    assert (found.exit_code, stale(found)) == (1, [("exp_avg", 0)])


def test_steps_that_go_back_are_stale():
    found = verdict({chunk("exp_avg"): CHANGED}, steps=(5, 3))
    assert found.exit_code == 1
    assert found.reasons == ("policy: step goes back from 5 to 3; are the folders swapped? (1 chunk): step of w",)


def test_without_a_step_an_advance_is_assumed():
    found = verdict({chunk("exp_avg"): SAME}, steps=None)
    assert found.exit_code == 1
    assert "no step is stored" in found.reasons[0]
    assert verdict({chunk("exp_avg"): CHANGED}, steps=None).exit_code == 0


@pytest.mark.parametrize(
    ("group_steps", "exit_code"), [(((1,), (2,)), 1), (((1, 4), (2, 5)), 1), (((1, 4), (1, 5)), 1), (((2,), (2,)), 0)]
)
def test_the_step_of_the_group_counts_where_no_other_is_stored(group_steps: tuple, exit_code: int):
    other = chunk("exp_avg", component="value")
    found = verdict({chunk("exp_avg"): SAME, other: CHANGED}, steps=None, group_steps=group_steps)
    assert found.exit_code == exit_code


def test_weights_alone_are_stale_only_if_all_repeat():
    a, b = chunk("weight"), chunk("weight", parameter="v")
    assert verdict({a: SAME, b: SAME}).exit_code == 1
    assert verdict({a: SAME, b: CHANGED}).exit_code == 0


def test_a_frozen_model_beside_a_trained_one_is_idle():
    reference = chunk("weight", component="reference")
    found = verdict({chunk("exp_avg"): CHANGED, reference: SAME})
    assert found.exit_code == 0
    assert [report.state for report in found.components] == ["advanced", "idle"]


def test_evidence_without_counterpart_cannot_be_told_unless_something_is_stale():
    lost = chunk("exp_avg", 8)
    assert verdict({chunk("exp_avg"): CHANGED}, old_only=(lost,)).exit_code == 2
    assert verdict({chunk("exp_avg"): SAME}, old_only=(lost,)).exit_code == 1
    assert verdict({chunk("exp_avg"): CHANGED}, new_only=(lost,)).exit_code == 0


def test_what_is_no_evidence_may_be_missing_or_repeat():
    assert verdict({chunk("exp_avg"): CHANGED}, old_only=(chunk("other"),)).exit_code == 0
    assert verdict({}, old_only=(chunk("other"),), new_only=(chunk("other"),)).exit_code == 2


def test_different_models_cannot_be_told():
    a, b = (Contents(Path("f"), "test", (chunk("exp_avg"),), identity=name) for name in ("m1", "m2"))
    found = judge(a, b, {chunk("exp_avg").place: CHANGED})
    assert (found.exit_code, found.reasons) == (2, ("the folders belong to different models: m1 and m2",))


def test_a_bf16_policy_in_critic_warm_up_is_idle_beside_the_value_model_that_trains():
    policy = {chunk("weight", dtype="BF16"): SAME, chunk("param"): SAME}
    value = {chunk("exp_avg", component="value"): CHANGED, chunk("weight", component="value"): CHANGED}
    found = verdict({**policy, **value}, steps=None)
    assert (found.exit_code, stale(found)) == (0, [])
    assert [(report.component, report.state) for report in found.components] == [
        ("policy", "idle"),
        ("value", "advanced"),
    ]
    assert verdict(policy, steps=None).exit_code == 1
