"""How buckets become messages: what is sent together, what is sent in parts, and that nothing is lost on the way."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.futures import Future

from commopt.compressors import create
from commopt.messages import Arrival, Bucket, Cutter, Message
from commopt.plan import Plan, TensorClass

NONE = Plan.uncompressed()
INT8 = Plan(create("int8"), feedback=False)
Shapes = dict[str, tuple[int, ...]]


def bucket(index: int, shapes: Shapes, last: bool = False, dtype: torch.dtype = torch.float32) -> Arrival:
    numels = [math.prod(shape) for shape in shapes.values()]
    buffer = torch.arange(sum(numels)).to(dtype)
    parts = buffer.split(numels)
    gradients = [part.view(shape) for part, shape in zip(parts, shapes.values(), strict=True)]
    return Arrival(Bucket(index, list(shapes), buffer, gradients, frozenset(), last), Future())


def fused(message_bytes: int | None, small: Plan | None = None) -> Plan:
    return Plan(create("int8"), False, small=small, message_bytes=message_bytes)


def names(messages: list[Message]) -> list[list[str]]:
    return [message.names for message in messages]


def test_buckets_go_as_they_are_unless_told() -> None:
    cutter = Cutter(INT8, {"a": "small", "b": "matrix"})
    arrivals = [bucket(0, {"a": (3,), "b": (2, 2)}), bucket(1, {"c": (5,)}, last=True)]
    assert [names(cutter.cut(arrival)) for arrival in arrivals] == [[["a", "b"]], [["c"]]]


def test_neighbours_travel_together_up_to_a_message() -> None:
    cutter = Cutter(fused(100), {})
    arrivals = [bucket(i, {name: (10,)}, last=i == 4) for i, name in enumerate("abcde")]  # of 40 bytes each
    cut = [cutter.cut(arrival) for arrival in arrivals]
    assert [names(messages) for messages in cut] == [[], [], [["a", "b", "c"]], [], [["d", "e"]]]
    assert cut[2][0].carries == arrivals[:3]
    assert [arrival.messages for arrival in arrivals] == [1] * 5
    assert cut[2][0].nbytes == 120


def test_large_buckets_are_sent_in_parts_of_whole_tensors() -> None:
    cutter = Cutter(fused(100), {})
    arrival = bucket(0, {"a": (30,), "b": (10,), "c": (20,), "d": (1,)}, last=True)
    cut = cutter.cut(arrival)
    assert names(cut) == [["a"], ["b", "c"], ["d"]]
    assert [message.index for message in cut] == [0, 1, 2]
    assert arrival.messages == 3
    assert [arrival.part_done() for _ in cut] == [False, False, True]


def test_classes_with_plans_of_their_own_are_kept_apart() -> None:
    classes: dict[str, TensorClass] = {"a": "matrix", "b": "small", "c": "matrix", "d": "small", "e": "embedding"}
    shapes: Shapes = dict.fromkeys(classes, (10,))
    cut = Cutter(fused(None, small=NONE), classes).cut(bucket(0, shapes, last=True))
    assert names(cut) == [["a", "c", "e"], ["b", "d"]]  # embeddings go as matrices do
    assert [message.plan for message in cut] == [INT8, NONE]


def test_classes_are_fused_each_for_itself() -> None:
    classes: dict[str, TensorClass] = {name: "small" if name in "bd" else "matrix" for name in "abcd"}
    cutter = Cutter(fused(80, small=NONE), classes)
    cut = [cutter.cut(bucket(i, {name: (10,)}, last=i == 3)) for i, name in enumerate("abcd")]
    assert [names(messages) for messages in cut] == [[], [], [["a", "c"]], [["b", "d"]]]


def test_a_plan_of_the_same_kind_makes_no_difference() -> None:
    cutter = Cutter(fused(None, small=INT8), {"a": "small", "b": "matrix"})
    assert names(cutter.cut(bucket(0, {"a": (3,), "b": (3,)}, last=True))) == [["a", "b"]]


def test_dtypes_are_kept_apart() -> None:
    cutter = Cutter(fused(1000), {})
    first = cutter.cut(bucket(0, {"a": (3,)}))
    second = cutter.cut(bucket(1, {"b": (3,)}, dtype=torch.bfloat16))
    third = cutter.cut(bucket(2, {"c": (3,)}, last=True))
    assert (first, second) == ([], [])
    assert names(third) == [["a", "c"], ["b"]]
    assert [message.dtype for message in third] == [torch.float32, torch.bfloat16]


def test_what_is_not_compressed_passes_through() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (4,), check_invariants=False)
    for gradient in (sparse, torch.ones(4, dtype=torch.int32), torch.empty(0)):
        cutter = Cutter(fused(1000), {})
        assert cutter.cut(bucket(0, {"a": (3,)})) == []
        arrival = Arrival(Bucket(1, ["odd"], gradient, [gradient], frozenset(), True), Future())
        passed, rest = cutter.cut(arrival)
        assert passed.plan is None
        assert passed.gradients[0] is gradient
        assert (passed.last, rest.last) == (False, True)  # what was open goes after it
        assert rest.names == ["a"]


def test_an_empty_bucket_names_all_that_it_is_of() -> None:
    (message,) = Cutter(INT8, {}).cut(bucket(0, {"a": (0,), "b": (0, 3)}, last=True))
    assert (message.names, message.plan) == (["a", "b"], None)


def test_a_step_in_one_bucket_is_cut_as_an_earlier_one() -> None:
    layout = [["c"], ["a", "b"]]
    arrival = bucket(0, {"a": (3,), "b": (3,), "c": (3,)}, last=True)
    cutter = Cutter(fused(1), {})
    cutter.begin(layout)
    cut = cutter.cut(arrival)
    assert names(cut) == layout
    assert [message.last for message in cut] == [False, True]
    assert cut[0].gradients[0].tolist() == [6, 7, 8]
    classes: dict[str, TensorClass] = {"c": "small", "a": "matrix", "b": "matrix"}
    cutter = Cutter(fused(None, small=NONE), classes)
    cutter.begin(layout)
    by_class = cutter.cut(arrival)
    assert [message.plan for message in by_class] == [NONE, INT8]


def test_a_layout_of_other_names_is_left_aside() -> None:
    cutter = Cutter(INT8, {})
    cutter.begin([["a"], ["z"]])
    assert names(cutter.cut(bucket(0, {"a": (3,), "b": (3,)}, last=True))) == [["a", "b"]]


def test_a_message_has_the_memory_of_its_bucket_where_that_is_in_one_piece() -> None:
    arrival = bucket(0, {"a": (30,), "b": (5, 2), "c": (20,)}, last=True)
    whole = arrival.bucket.buffer
    (message,) = Cutter(INT8, {}).cut(arrival)
    assert message.buffer is not None
    assert (message.buffer.data_ptr(), message.buffer.numel()) == (whole.data_ptr(), 60)

    first, rest = Cutter(fused(100), {}).cut(arrival)
    assert first.buffer is not None
    assert rest.buffer is not None
    assert rest.buffer.tolist() == list(range(30, 60))
    rest.buffer[0] = -1.0
    assert arrival.bucket.gradients[1][0, 0] == -1.0


def test_a_message_of_scattered_gradients_has_no_memory_in_one_piece() -> None:
    classes: dict[str, TensorClass] = {"a": "matrix", "b": "small", "c": "matrix"}
    scattered, alone = Cutter(fused(None, small=NONE), classes).cut(
        bucket(0, {"a": (3,), "b": (3,), "c": (3,)}, last=True)
    )
    assert scattered.buffer is None
    assert alone.buffer is not None
    assert alone.buffer.tolist() == [3, 4, 5]
    cutter = Cutter(fused(1000), {})
    cutter.cut(bucket(0, {"a": (3,)}))
    (of_two,) = cutter.cut(bucket(1, {"b": (3,)}, last=True))
    assert of_two.buffer is None
    cutter = Cutter(fused(1000, small=NONE), {"a": "matrix", "b": "small", "c": "matrix"})
    cutter.cut(bucket(0, {"a": (3,)}))
    (also_of_two, _) = cutter.cut(bucket(1, {"b": (3,), "c": (3,)}, last=True))
    assert also_of_two.names == ["a", "c"]  # "c" begins in its bucket where "a" ends in its own
    assert also_of_two.buffer is None


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=5), min_size=1, max_size=6),
    doubles=st.sets(st.integers(0, 5)),
    small=st.sets(st.integers(0, 29)),
    plan=st.sampled_from([INT8, fused(1), fused(100), fused(10**6), fused(None, NONE), fused(64, NONE)]),
)
def test_each_gradient_is_in_one_message(
    sizes: list[list[int]], doubles: set[int], small: set[int], plan: Plan
) -> None:
    arrivals, count = [], 0
    classes: dict[str, TensorClass] = {}
    for index, numels in enumerate(sizes):
        shapes: Shapes = {}
        for numel in numels:
            shapes[f"p{count}"] = (numel,)
            classes[f"p{count}"] = "small" if count in small else "matrix"
            count += 1
        dtype = torch.float64 if index in doubles else torch.float32
        arrivals.append(bucket(index, shapes, index == len(sizes) - 1, dtype))
    cutter, messages = Cutter(plan, classes), list[Message]()
    for arrival in arrivals:
        cut = cutter.cut(arrival)
        messages += cut
        if plan.message_bytes is None:
            assert cut  # nothing waits for a bucket to come

    assert sorted(name for message in messages for name in message.names) == sorted(classes)
    assert [message.last for message in messages] == [False] * (len(messages) - 1) + [True]
    assert [message.index for message in messages] == list(range(len(messages)))
    for arrival in arrivals:
        assert arrival.messages == sum(arrival in message.carries for message in messages) >= 1
        for name, gradient in zip(arrival.bucket.names, arrival.bucket.gradients, strict=True):
            (message,) = [message for message in messages if name in message.names]
            assert arrival in message.carries
            if message.plan is not None:
                assert message.gradients[message.names.index(name)] is gradient
                assert message.dtype == gradient.dtype
                assert message.plan == plan.of(classes[name])
    for message in messages:
        buffer = message.buffer if message.plan is not None else None
        if buffer is not None:
            assert torch.equal(buffer, torch.cat([gradient.flatten() for gradient in message.gradients]))
    if plan.message_bytes is not None:
        open_ones = [m for m in messages if m.plan is not None and m.nbytes < plan.message_bytes]
        assert len(open_ones) <= 4  # at most one of each class and dtype, at the end


def test_classes_that_travel_alike_share_messages() -> None:
    plan = Plan(create("int8"), False, small=NONE, embedding=NONE, message_bytes=1000)
    cutter = Cutter(plan, {"s": "small", "e": "embedding", "m": "matrix"})
    assert names(cutter.cut(bucket(0, {"s": (3,), "m": (4, 4), "e": (5, 2)}, last=True))) == [["s", "e"], ["m"]]


def test_a_step_that_was_given_up_leaves_nothing_behind() -> None:
    cutter = Cutter(fused(1000), {})
    assert cutter.cut(bucket(0, {"a": (3,)})) == []
    cutter.begin()
    (message,) = cutter.cut(bucket(0, {"b": (3,)}, last=True))
    assert (message.index, message.names) == (0, ["b"])
