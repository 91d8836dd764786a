"""Suites: what the issue promises of each, the user's TOML file, mask texts, grids, and `--quick`."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from attnbench import masks
from attnbench.errors import BrokenFile, InvalidWorkload, UnknownName, UsageError
from attnbench.masks import MaskShape
from attnbench.masks.text import parse_mask
from attnbench.spec import Workload
from attnbench.workloads import cost, suites
from attnbench.workloads.suite_file import grid

ALL = [
    "quick", "ci", "regression", "grid", "grid-gpu", "gemma", "square-cpu", "decode",
    "long", "block-sparse", "million", "models", "dilated", "multihead", "models-e2e", "edge",
]  # fmt: skip


def workloads(name: str) -> tuple[Workload, ...]:
    return suites.load(name).workloads


def test_names():
    assert suites.names() == ALL


@pytest.mark.parametrize("name", ALL)
def test_every_workload_is_unique_and_survives_json(name):
    found = workloads(name)
    assert len({workload.id for workload in found}) == len(found) > 0
    for workload in found:
        assert msgspec.json.decode(msgspec.json.encode(workload), type=Workload) == workload
        assert cost.demand(workload).bytes > 0


def test_unknown_suite_names_the_nearest():
    with pytest.raises(UnknownName) as caught:
        suites.load("gema")
    assert caught.value.near == ["gemma"]


def test_quick_is_light_and_touches_every_path():
    found = workloads("quick")
    assert len(found) == 6
    assert {w.pass_ for w in found} == {"forward", "train"}
    assert {kind for w in found for kind in w.visible_mask.kinds} == {"full", "causal", "window"}
    assert {w.dtype for w in found} == {"float32", "bfloat16"}
    assert any(w.q_len == 1 for w in found)
    assert any(w.group > 1 for w in found)
    assert max(cost.demand(w).flops for w in found) < 1e9


def test_grid_is_the_whole_product_and_grid_gpu_a_part_of_it():
    found = workloads("grid")
    axes = {(w.q_len, w.batch, w.heads, w.kv_heads, w.pass_) for w in found}
    assert len(axes) == len(found) == 5 * 4 * 2 * 2
    assert {w.head_dim for w in found} == {128}
    part = workloads("grid-gpu")
    assert len(part) == 24
    assert {w.id for w in part} < {w.id for w in found}
    assert {w.q_len for w in part} == {512, 1024, 2048, 4096, 8192}


def test_gemma_has_openpis_shapes_and_masks():
    found = {(w.tags[0], w.tags[1], w.q_len): w for w in workloads("gemma")}
    train = found["pi0", "train", 867]
    assert (train.batch, train.heads, train.kv_heads, train.head_dim, train.pass_) == (32, 8, 1, 256, "train")
    running = np.cumsum([0] * 816 + [1] + [1] + [0] * 49)
    assert train.mask == masks.block_causal(running)
    denoise = found["pi0", "denoise", 51]
    assert denoise.kv_len == 867
    rows = train.visible_mask.array(train.mask_shape)[0, 0, -51:]
    np.testing.assert_array_equal(denoise.visible_mask.array(denoise.mask_shape)[0, 0], rows)
    fast = found["pi0-FAST", "train", 1017]
    same = masks.prefix(838).pairs(fast.mask_shape)
    assert fast.visible_mask.pairs(fast.mask_shape) == same  # bidirectional prompt, causal answer
    assert found["pi0-FAST", "decode", 1].kv_len == 1274
    assert found["pi0.5", "denoise", 50].kv_len == 1018
    assert found["SigLIP So400m/14", "prefill", 256].head_dim == 72
    droid = found["pi0 droid", "denoise", 11]
    assert not droid.visible_mask.array(droid.mask_shape)[..., 512:768].any()
    assert all(w.source for w in found.values())


def test_square_decode_and_long():
    square = workloads("square-cpu")
    assert {(w.q_len, w.head_dim, w.heads) for w in square} == {(n, n, 1) for n in (32, 64, 128, 256, 512)}
    assert {w.inputs for w in square} == {"normal", "sincostan"}
    decode = workloads("decode")
    assert {w.q_len for w in decode} == {1, 4, 8}
    assert {min(w.kv_len for w in decode), max(w.kv_len for w in decode)} == {1024, 131072}
    assert {w.q_len for w in workloads("long")} == {2**n * 1024 for n in range(5, 11)}
    assert [w.id for w in workloads("million")] == [
        f"b1-t1048576-h4:1-d128-causal-bfloat16-{pass_}" for pass_ in ("forward", "train")
    ]


def test_models_have_their_peculiarities_and_a_source():
    by_model = {}
    for workload in workloads("models"):
        by_model.setdefault(workload.tags[0], []).append(workload)
        assert workload.source.startswith(workload.tags[0])
    assert len(by_model) == 9
    assert {w.softcap for w in by_model["Gemma-2-9B"]} == {50.0}
    assert {w.softcap for w in by_model["Gemma-3-27B"]} == {None}
    # a sliding window of 1024 tokens counts the token itself
    window = next(w for w in by_model["Gemma-3-12B"] if "window" in w.visible_mask.kinds)
    assert window.visible_mask.array(window.mask_shape, np.array([4000])).sum() == 1024
    assert {(w.head_dim, w.value_dim) for w in by_model["DeepSeek-V3"]} == {(192, 128)}
    assert {(w.heads, w.kv_heads) for w in by_model["Llama-3.1-70B"]} == {(64, 8)}


def test_edge_covers_what_the_issue_lists():
    found = workloads("edge")
    kinds = {kind for w in found for kind in w.visible_mask.kinds}
    assert kinds == {
        "full", "causal", "window", "prefix", "block_causal", "documents", "lengths", "valid",
        "dilated", "blocks", "dense", "alibi",
    }  # fmt: skip
    assert {8, 16, 32, 64, 72, 80, 96, 128, 256} <= {w.head_dim for w in found}
    assert any(w.q_len == 1 for w in found)
    assert any(w.kv_len == 1 for w in found)
    assert any(w.q_len < w.kv_len for w in found)
    assert any(w.q_len > w.kv_len for w in found)
    assert any(w.kv_heads == 1 < w.heads for w in found)
    blind = [w for w in found if not w.visible_mask.array(w.mask_shape).any(-1).all()]
    assert {w.pass_ for w in blind} >= {"forward", "train"}, "rows that see no key"
    assert max(cost.demand(w).flops for w in found) < 1e8, "conformance stays fast"


@pytest.mark.parametrize("name", ALL)
def test_quicken_caps_every_shape_and_keeps_its_kind(name):
    suite = suites.load(name)
    quick = suites.quicken(suite)
    assert 0 < len(quick.workloads) <= len(suite.workloads)
    for w in quick.workloads:
        assert w.batch <= 2
        assert w.heads <= 8
        assert w.q_len <= 512
        assert w.kv_len <= (4096 if w.q_len < w.kv_len else 512)
        assert cost.demand(w).flops > 0 or "causal" in w.visible_mask.kinds
    before = {(kinds, w.pass_, w.group) for w in suite.workloads if (kinds := w.visible_mask.kinds) and w.group <= 8}
    assert {(w.visible_mask.kinds, w.pass_, w.group) for w in quick.workloads} == before
    assert suites.quicken(quick).workloads == quick.workloads


def shrunk(**fields) -> Workload:
    (workload,) = suites.quicken(suites.Suite("x", "", (Workload(**fields),))).workloads
    return workload


def test_quicken_scales_masks_with_the_tokens():
    shape = {"batch": 4, "q_len": 2048, "heads": 64, "kv_heads": 8, "head_dim": 16}
    assert shrunk(**shape, mask=masks.window(512, None)).mask == masks.window(128, None)
    assert shrunk(**shape, mask=masks.prefix(1024)).mask == masks.prefix(256)
    assert shrunk(**shape, mask=masks.lengths([2048, 1, 0, 9])).mask == masks.lengths([512, 1])
    assert shrunk(**shape, mask=masks.dilated([1024, 2048], [1, 2])).mask == masks.dilated([256, 512], [1, 2])
    thirds = masks.documents(np.repeat([0, 1], [512, 1536]))
    assert shrunk(**shape, mask=thirds).mask == masks.documents(np.repeat([0, 1], [128, 384]))
    kept = np.tri(32, dtype=bool)
    assert shrunk(**shape, mask=masks.blocks(kept, 64)).mask == masks.blocks(kept[:8, :8], 64)
    w = shrunk(**shape)
    assert (w.batch, w.heads, w.kv_heads, w.q_len) == (2, 8, 1, 512)


def test_quicken_keeps_rectangles_and_small_workloads():
    w = shrunk(batch=1, q_len=1000, kv_len=2000, heads=6, kv_heads=2, head_dim=16, mask=masks.causal())
    assert (w.q_len, w.kv_len, w.heads, w.kv_heads) == (256, 512, 6, 2)
    w = shrunk(batch=1, q_len=8, kv_len=100_000, heads=32, kv_heads=8, head_dim=16)
    assert (w.q_len, w.kv_len, w.heads, w.kv_heads) == (8, 4096, 8, 2)


SHAPE = MaskShape(2, 4, 64, 96)
TEXTS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "causal:top-left": masks.causal("top-left"),
    "window:16": masks.window(16),
    "window:16:4": masks.window(16, 4),
    "window:all:4:top-left": masks.window(None, 4, "top-left"),
    "prefix:10": masks.prefix(10),
    "lengths:96,3": masks.lengths([96, 3]),
    "block_causal:90,1,5": masks.block_causal([0] * 90 + [1] + [2] * 5),
    "documents:50,46": masks.documents([0] * 50 + [1] * 46),
    "valid:0-9,95": masks.valid([j < 10 or j == 95 for j in range(96)]),
    "causal & lengths:96,3": masks.causal() & masks.lengths([96, 3]),
    "blocks:local:50:32": masks.blocks([[True, True, False], [False, True, True]], 32),
    "blocks:local:50:32:causal": masks.causal() & masks.blocks([[False, True, False], [False, True, True]], 32),
}


@pytest.mark.parametrize("text", TEXTS)
def test_mask_texts(text):
    assert parse_mask(text, SHAPE) == TEXTS[text]


def test_alibi_text_and_thinned_heads():
    shape = MaskShape(2, 4, 8, 16)
    assert parse_mask("alibi", shape) == masks.alibi(4)
    assert parse_mask("causal&alibi:top-left", shape) == masks.causal() & masks.alibi(4, "top-left")
    fewer = suites.shrink_mask(masks.alibi([0.5, 0.25, 0.125, 0.0]), shape, shape._replace(heads=2, q_len=4, kv_len=8))
    assert fewer == masks.alibi([0.5, 0.25])


def test_dilated_text():
    square = MaskShape(1, 2, 64, 64)
    assert parse_mask("dilated:16r1+64r4", square) == masks.dilated([16, 64], [1, 4])
    assert parse_mask("dilated:16r1+64r4:group", square) == masks.dilated([16, 64], [1, 4], "group")


WRONG_TEXTS = [
    ("windo:3", "Near: window"),
    ("window", "write window:LEFT[:RIGHT][:top-left]"),
    ("window:1:2:3", "write window:"),
    ("window:-3", 'window side "-3" is not a whole number'),
    ("causal:middle", "write causal[:top-left]"),
    ("full:3", "write full"),
    ("prefix:x", 'prefix "x"'),
    ("lengths:96", "has 1 batch rows, the workload has 2"),
    ("lengths:97,1", "0 ... 96"),
    ("documents:50,40", "covers 90 tokens, kv_len is 96"),
    ("valid:90-96", "do not lie in 0-95"),
    ("dilated:16", "write dilated:"),
    ("dilated:16r1", "self-attention"),
    ("blocks:random", "write blocks:PATTERN:PERCENT[:SIZE][:causal]"),
    ("blocks:randm:50", "Near: random"),
    ("blocks:random:100", "less than 1"),
    ("blocks:random:half", "write blocks:"),
    ("dense", "no text form"),
    ("", "no mask called"),
]


@pytest.mark.parametrize("text,words", WRONG_TEXTS, ids=[text for text, _ in WRONG_TEXTS])
def test_wrong_mask_text(text, words):
    with pytest.raises(UsageError) as caught:
        parse_mask(text, SHAPE)
    assert words in str(caught.value)


def test_grid_product_heads_and_order():
    found = grid(
        batch=[1, 2], q_len=64, heads=[8, (8, 2), "8:1"], head_dim=32, mask=["full", "window:4"], pass_="train"
    )
    assert len(found) == 12
    assert [(w.batch, w.heads, w.kv_heads) for w in found[:6:2]] == [(1, 8, 8), (1, 8, 2), (1, 8, 1)]
    assert {w.pass_ for w in found} == {"train"}
    assert len(grid(batch=[1, 1], q_len=8, heads=["2", 2, "2:2"], head_dim=8)) == 1


def test_grid_refuses_what_means_nothing():
    good = {"batch": 1, "q_len": 8, "heads": 2, "head_dim": 8}
    with pytest.raises(UnknownName, match="Near: batch"):
        grid(**good, batchs=2)
    with pytest.raises(InvalidWorkload, match="also needs q_len"):
        grid(batch=1, heads=2, head_dim=8)
    for heads in ("a", "4:0", "4:2:1", "4:", (4, 2, 1)):
        with pytest.raises(InvalidWorkload, match="such as 32:8"):
            grid(**(good | {"heads": heads}))
    for heads in (2.0, {}, None):
        with pytest.raises(InvalidWorkload, match="such as 32:8"):
            grid(**(good | {"heads": heads}))
    for tags in ("abc", 3, [1]):
        with pytest.raises(InvalidWorkload, match="tags must be a list of words"):
            grid(**good, tags=tags)
    for axis in ("mask", "dtype", "kv_len"):
        with pytest.raises(InvalidWorkload, match=f"{axis} is an empty list"):
            grid(**good, **{axis: []})
    with pytest.raises(InvalidWorkload, match="scale must be a finite number"):
        grid(**good, scale="big")


GOOD_FILE = """
name = "mine"
description = "two of everything"

[[workload]]
batch = [1, 2]
q_len = 64
heads = ["8:2", 4]
head_dim = 32
mask = ["causal", { kind = "window", left = 8, right = 2 }, { kind = "both", parts = ["causal", "prefix:3"] }]
pass = "train"
tags = ["a", "b"]

[[workload]]
batch = 1
q_len = 1
kv_len = 128
heads = 2
head_dim = 64
v_head_dim = 32
dtype = "bfloat16"
mask = { kind = "documents", sizes = [100, 28] }
"""


def test_users_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD_FILE)
    suite = suites.load(str(path))
    assert (suite.name, suite.description) == ("mine", "two of everything")
    assert len(suite.workloads) == 2 * 2 * 3 + 1
    assert suite.workloads[1].mask == masks.window(8, 2)
    assert suite.workloads[2].mask == masks.causal() & masks.prefix(3)
    assert suite.workloads[0].tags == ("a", "b")
    assert suite.workloads[-1].visible_mask.pairs(suite.workloads[-1].mask_shape) == 2 * 28


PLAIN = "[[workload]]\nbatch = 1\nq_len = 8\nheads = 2\nhead_dim = 8\n"
WRONG_FILES = [
    ("[[workload]]\nbatch = 1\nq_len = = 3\n", 3, "not valid TOML"),
    ("[[workload]]\nbatch = [1,\n", 2, "not valid TOML"),
    ("title = 1\n", 1, "no suite field"),
    ('name = "x"\n', None, "at least one [[workload]]"),
    ("workload = [1]\n", None, "at least one [[workload]]"),
    ("[[workload]]\nbatch = 1\nq_lenn = 3\n", 3, "Near: q_len"),
    ("[[workload]]\nbatch = 1\n", 1, "also needs q_len, heads, head_dim"),
    ("[[workload]]\nbatch = 1\nq_len = 'x'\nheads = 2\nhead_dim = 8\n", 3, "q_len must be a whole number"),
    ("[[workload]]\nbatch = 1\nq_len = 8\nheads = '12:5'\nhead_dim = 8\n", 4, "12 query heads cannot share 5"),
    ("[[workload]]\nbatch = 1\nq_len = 8\nheads = 2\nhead_dim = 8\nmask = 'cau'\n", 6, "no mask called"),
    (
        "[[workload]]\nbatch = 1\nq_len = 8\nheads = 2\nhead_dim = 8\nmask = {kind = 'window', width = 3}\n",
        6,
        "takes left, right",
    ),
    ("[[workload]]\nbatch = 1\nq_len = 8\nheads = 2\nhead_dim = 8\nmask = 'lengths:1,2'\n", 6, "has 2 batch rows"),
    ("[[workload]]\nbatch = 1\nq_len = 8\nheads = 2\nhead_dim = 8\nmask = 3\n", 6, "mask must be text"),
    ("[[workload]]\nbatch = 1\nq_len = 8\nheads = 2.0\nhead_dim = 8\n", 4, "heads must be a number"),
    ("[[workload]]\nbatch = 1\nq_len = []\nheads = 2\nhead_dim = 8\n", 3, "q_len is an empty list"),
    (f"{PLAIN}mask = []\n", 6, "mask is an empty list"),
    (f"{PLAIN}tags = 'abc'\n", 6, "tags must be a list of words"),
    (f"{PLAIN}step = 'foo'\n", 6, 'no step called "foo". Known: multihead'),
    (f"{PLAIN}dtype = {{}}\n", 6, "dtype must be text"),
    (f"{PLAIN}source = 3\n", 6, "source must be text"),
    (f"{PLAIN}mask = {{kind = ['window']}}\n", 6, "no mask called"),
    (f"{PLAIN}mask = {{kind = 'window', left = true}}\n", 6, "a window reaches 0 or more keys"),
    (f"{PLAIN}mask = {{kind = 'prefix', n = 'x'}}\n", 6, "a prefix has 0 or more keys"),
    (f"{PLAIN}mask = {{kind = 'both'}}\n", 6, "needs parts"),
    (f"{PLAIN}mask = {{kind = 'documents', sizes = [4, 4.5]}}\n", 6, "each of sizes must be a whole number"),
    (f"{PLAIN}mask = {{kind = 'documents', sizes = [-1, 9]}}\n", 6, "each of sizes must be 0 or more"),
    (f"{PLAIN}mask = {{kind = 'block_causal', mask_ar = 5}}\n", 6, "mask_ar must be runs of 0 and 1"),
    (f"{PLAIN}mask = {{kind = 'block_causal', mask_ar = '0*99999999999'}}\n", 6, "mask_ar run can be 2147483647"),
    (f"{PLAIN}mask = {{kind = 'blocks', block_mask = [[true]], block_size = 8.5}}\n", 6, "block_size must be a whole"),
    (
        "[[workload]]\nbatch=1\nq_len=8\nheads=2\nhead_dim=8\n\n[[workload]]\nbatch=0\nq_len=8\nheads=2\nhead_dim=8\n",
        8,
        "batch",
    ),
]


@pytest.mark.parametrize("text,line,words", WRONG_FILES, ids=[words for _, _, words in WRONG_FILES])
def test_wrong_file_names_the_line(tmp_path, text, line, words):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(BrokenFile) as caught:
        suites.load(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}, line {line}: " if line else f"{path}: ")


def test_missing_or_unreadable_file(tmp_path):
    with pytest.raises(BrokenFile, match="no such file"):
        suites.load(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BrokenFile, match="cannot be read"):
        suites.load(tmp_path / "bytes.toml")
