"""What Transformers' mask functions mean is described exactly, and as an array only where it must be."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import masking_utils as masking

from attnbench.dispatch.hf_masks import DescribedMask, MaskArray, describe
from attnbench.masks import MaskShape

pytestmark = pytest.mark.torch
LEFT = torch.tensor([0, 3])
FUNCTIONS = {
    "causal": masking.causal_mask_function,
    "full": masking.bidirectional_mask_function,
    "sliding": masking.sliding_window_causal_mask_function(4),
    "sliding wider than all": masking.sliding_window_causal_mask_function(99),
    "sliding both ways": masking.sliding_window_bidirectional_mask_function(2),
    "chunked": masking.chunked_causal_mask_function(3, LEFT),
    "packed": masking.and_masks(
        masking.causal_mask_function,
        masking.packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 3 + [2] * 7])),
    ),
}
STEPS = {  # (q_length, kv_length, q_offset, kv_offset)
    "whole": (12, 12, 0, 0),
    "a part over a dynamic cache": (4, 12, 8, 0),
    "one token over a dynamic cache": (1, 12, 11, 0),
    "the first part into a static cache": (5, 12, 0, 0),
    "a later part into a static cache": (3, 12, 5, 0),
    "a part over the window of a cache": (3, 6, 9, 6),
    "one token over the window of a cache": (1, 4, 9, 6),
}
PADDINGS = {"none": None, "left": (0, 3, 12), "right": (0, 0, 8), "holes": (1, 4, 12)}


def padding(name, length):
    if PADDINGS[name] is None:
        return None
    mask = torch.ones(2, length, dtype=torch.bool)
    row, first, last = 1, *PADDINGS[name][1:]
    if name == "holes":
        mask[row, 4:6] = False
    else:
        mask[row, :first] = False
        mask[row, last:] = False
    return mask


@pytest.mark.parametrize(("function", "step", "pad"), list(product(FUNCTIONS, STEPS, PADDINGS)))
def test_the_description_is_the_array(function, step, pad):
    q_length, kv_length, q_offset, kv_offset = STEPS[step]
    seen_so_far = min(q_offset + q_length, 12)
    given = {
        "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[function], "attention_mask": padding(pad, seen_so_far), "device": "cpu",
    }  # fmt: skip
    expected = masking.sdpa_mask(**given, allow_is_causal_skip=False)
    found = describe(**given)
    assert found.shape == (2, 1, q_length, kv_length)
    assert torch.equal(found | False, expected)
    if not isinstance(found, DescribedMask):
        assert function in ("sliding both ways", "chunked", "packed")
        return
    mask, first, last, _, real = found.described
    assert "dense" not in mask.kinds
    shape = MaskShape(2, 1, q_length, last - first)
    mask.check(shape)
    inside = np.broadcast_to(mask.array(shape), tuple(shape))
    assert np.array_equal(inside, expected[..., first:last].numpy())
    assert real is None or torch.equal(real, expected[..., first:last])
    assert not expected[..., :first].any()
    assert not expected[..., last:].any()


@pytest.mark.parametrize(
    ("function", "step", "kinds"),
    [
        ("causal", "whole", ("causal",)),
        ("causal", "one token over a dynamic cache", ("full",)),
        ("causal", "a later part into a static cache", ("causal",)),
        ("sliding", "whole", ("window",)),
        ("sliding", "one token over the window of a cache", ("full",)),
        ("sliding wider than all", "whole", ("causal",)),
        ("full", "whole", ("full",)),
        ("packed", "whole", ("causal", "documents")),
        ("chunked", "whole", ("causal", "documents")),
    ],
)
def test_the_simplest_description_is_found(function, step, kinds):
    names = ("q_length", "kv_length", "q_offset", "kv_offset")
    found = describe(batch_size=2, **dict(zip(names, STEPS[step])), mask_function=FUNCTIONS[function], device="cpu")
    assert found.described.mask.kinds == kinds


@pytest.mark.parametrize(("pad", "kind"), [("left", "valid"), ("right", "lengths"), ("holes", "valid")])
def test_padding_is_named_by_its_form(pad, kind):
    found = describe(batch_size=2, q_length=12, kv_length=12, attention_mask=padding(pad, 12), device="cpu")
    assert found.described.mask.kinds == ("causal", kind)


def test_keys_that_no_query_sees_are_left_out():
    static = describe(batch_size=1, q_length=3, kv_length=64, q_offset=5, device="cpu")
    assert (static.described.first, static.described.last) == (0, 8)
    window = masking.sliding_window_causal_mask_function(4)
    found = describe(batch_size=1, q_length=1, kv_length=64, q_offset=50, mask_function=window, device="cpu")
    assert (found.described.first, found.described.last) == (47, 51)


def test_a_function_of_ones_own_is_evaluated():
    own = masking.or_masks(masking.causal_mask_function, lambda b, h, q, kv: kv < 3)
    found = describe(batch_size=1, q_length=6, kv_length=6, mask_function=own, device="cpu")
    assert type(found) is MaskArray
    assert found[0, 0, 0].tolist() == [True] * 3 + [False] * 3


def test_a_step_that_will_be_compiled_gets_its_array():
    found = describe(
        batch_size=2, q_length=1, kv_length=8, q_offset=torch.tensor(3), allow_is_causal_skip=False, device="cpu"
    )
    assert type(found) is torch.Tensor
    assert found[0, 0, 0].tolist() == [True] * 4 + [False] * 4


def test_a_described_mask_is_taken_for_its_array():
    mask = describe(batch_size=2, q_length=5, kv_length=5, device="cpu")
    whole = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    assert (mask.ndim, mask.dtype, mask.device.type, len(mask)) == (4, torch.bool, "cpu", 2)
    assert torch.equal(mask[:, :, 2:], whole[:, :, 2:])
    assert torch.equal(torch.cat([mask, mask]), torch.cat([whole, whole]))
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(whole, 0.0, -1.0))
    assert torch.equal(torch.ones(2, 1, 5, 5).masked_fill(~mask, 0.0), whole.float())
    assert torch.equal(mask & whole[..., :1], whole & whole[..., :1])
    assert type(mask[:, :, 2:]) is MaskArray
    assert type(~mask) is torch.Tensor


def test_copies_and_whole_slices_are_descriptions():
    """Layers cut the mask to their keys, and accelerate's hooks move it: no T x S array for any of them."""
    mask = describe(batch_size=2, q_length=5, kv_length=5, attention_mask=padding("left", 5), device="cpu")
    mask.evaluate = pytest.fail
    for copy in (mask.to("cpu"), mask.clone(), mask.detach(), mask.contiguous(), mask[:, :, :, :5], mask[..., :7]):
        assert isinstance(copy, DescribedMask)
        assert copy.described is mask.described or copy.described == mask.described
    moved = mask.to("meta")
    assert isinstance(moved, DescribedMask)
    assert moved.device.type == "meta"


def test_the_array_is_made_once(monkeypatch):
    made, make = [], masking.sdpa_mask
    monkeypatch.setattr(masking, "sdpa_mask", lambda **given: made.append(1) or make(**given))
    mask = describe(batch_size=2, q_length=5, kv_length=5, device="cpu")
    for _ in range(3):
        mask[:, :, :, :4]
        mask.to("cpu")[:, :, 2:]
    assert made == [1]
