"""Plans as values: classes of tensors, the plan of each, the way to milder ones, and plain data."""

import json

import pytest

from commopt.compressors import create
from commopt.errors import ConfigError
from commopt.plan import SMALL, Plan, TensorClass, class_of

NONE = Plan.uncompressed()
INT4 = Plan(create("int4"), feedback=True)
INT8 = Plan(create("int8"), feedback=False)
MIXED = Plan(create("powersgd", rank=2), True, small=NONE, embedding=INT8, message_bytes=1 << 20)


@pytest.mark.parametrize(
    ("shape", "embedding", "kind"),
    [
        ((), False, "small"),
        ((10**6,), False, "small"),  # a vector, however long
        ((10**6,), True, "small"),
        ((SMALL // 2, 2), False, "small"),
        ((SMALL // 2, 2), True, "small"),
        ((SMALL + 1, 1), False, "matrix"),
        ((64, 3, 7, 7), False, "matrix"),
        ((SMALL + 1, 1), True, "embedding"),
        ((10**6, 0), False, "small"),
    ],
)
def test_the_class_of_a_tensor(shape: tuple[int, ...], embedding: bool, kind: TensorClass) -> None:
    assert class_of(shape, embedding) == kind


def test_each_class_has_its_plan_or_that_of_matrices() -> None:
    assert MIXED.of("small") == NONE
    assert MIXED.of("embedding") == INT8
    assert MIXED.of("matrix") == Plan(create("powersgd", rank=2), True)  # alike in the class: nothing is left to part
    assert INT4.of("small") == INT4.of("embedding") == INT4.of("matrix") == INT4
    assert Plan(create("int4"), True, message_bytes=1000).of("embedding") == INT4


def test_parts_hold_each_plan_once() -> None:
    assert MIXED.parts == (Plan(create("powersgd", rank=2), True), INT8, NONE)
    assert INT4.parts == (INT4,)
    assert Plan(create("int4"), True, small=INT4, embedding=NONE).parts == (INT4, NONE)


def test_only_what_goes_bucket_by_bucket_is_uniform() -> None:
    assert INT4.uniform
    assert not any(
        plan.uniform
        for plan in (Plan(create("int4"), True, small=NONE), Plan(create("int4"), True, message_bytes=1), MIXED)
    )


def test_milder_plans_keep_their_parts() -> None:
    plan = Plan(create("int4"), True, small=INT8, embedding=INT4, message_bytes=1000)
    one = plan.milder(1)
    bf16 = Plan(create("bf16"), feedback=False)
    assert one == Plan(create("int8"), False, small=bf16, embedding=INT8, message_bytes=1000)
    assert plan.milder(2) == Plan(create("bf16"), False, small=NONE, embedding=bf16, message_bytes=1000)
    assert plan.milder(0) is plan
    assert plan.milder(99).lossless
    assert plan.milder(99).message_bytes == 1000


def test_what_is_uncompressed_stays_so_beside_what_becomes_milder() -> None:
    plan = Plan(create("int4"), True, small=NONE)
    assert plan.milder(1) == Plan(create("int8"), False, small=NONE)
    assert NONE.milder(3) is NONE


def test_lossless_means_all_parts() -> None:
    assert NONE.lossless
    assert Plan(create("none"), False, small=NONE, message_bytes=1).lossless
    assert not Plan(create("none"), False, small=INT8).lossless
    assert not Plan(create("none"), False, embedding=INT8).lossless
    assert not MIXED.lossless


def test_residuals_are_kept_where_any_part_keeps_them() -> None:
    assert INT4.keeps_residuals
    assert Plan(create("none"), False, small=INT4).keeps_residuals
    assert Plan(create("none"), False, embedding=INT4).keeps_residuals
    assert not Plan(create("int8"), False, small=NONE, embedding=INT8).keeps_residuals


def test_a_change_reaches_each_part() -> None:
    changed = MIXED.each(lambda part: Plan(part.compressor, feedback=True))
    assert [part.feedback for part in changed.parts] == [True, True, True]
    assert changed.small == Plan(create("none"), True)
    assert changed.message_bytes == MIXED.message_bytes


@pytest.mark.parametrize("plan", [NONE, INT4, MIXED, Plan(create("topk", density=0.001), True, small=INT8)], ids=str)
def test_plans_travel_as_json(plan: Plan) -> None:
    back = Plan.from_plain(json.loads(json.dumps(plan.to_plain())))
    assert back == plan
    assert str(back) == str(plan)  # what ranks compare


def test_plain_data_of_no_plan_is_refused() -> None:
    plain = MIXED.to_plain()
    plain["small"] = {**plain["small"], "compressor": "int5"}
    with pytest.raises(ConfigError, match="int5"):
        Plan.from_plain(plain)
