"""Names -> implementations: entry points, hand-registered ones, references to files and modules, and wrong names."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

import attnbench as ab
from attnbench import registry
from attnbench.errors import UnknownName, UsageError
from attnbench.registry import Function, load_reference, resolve
from attnbench.run.plan import group_of
from attnbench.spec import Implementation, Workload

WORKLOAD = Workload(batch=1, q_len=8, heads=1, head_dim=8)


class Mine(Implementation):
    name = "torch.mine"
    framework = "torch"

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        return lambda q, k, v: v


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def test_every_entry_point_loads_and_has_its_name():
    assert len(registry.names()) >= 30
    for name in registry.names():
        implementation = registry.get(name)
        assert implementation.name == name
        assert name.startswith(f"{implementation.framework}.")
        assert registry.origin(name) == "attnbench"
        assert implementation.layout in ("bshd", "bhsd")
        assert repr(implementation) == f"<{name}>"


def test_names_are_sorted_and_told_without_loading_anything(monkeypatch):
    broken = SimpleNamespace(name="torch.broken", load=lambda: pytest.fail("loaded"))
    monkeypatch.setattr(registry, "_entry_points", lambda: {"torch.broken": broken, "a.first": broken})
    assert registry.names() == ["a.first", "torch.broken"]


def test_one_registered_by_hand_is_found_listed_and_returned():
    mine = Mine()
    assert ab.register(mine) is mine
    assert registry.get("torch.mine") is mine
    assert "torch.mine" in ab.implementations()
    assert registry.origin("torch.mine") == "this process"


def test_only_implementations_can_be_registered():
    with pytest.raises(UsageError, match="not function"):
        ab.register(lambda q, k, v: q)


@pytest.mark.parametrize("wrong, near", [("torch.sdap", "torch.sdpa"), ("jax.einsumm", "jax.einsum")])
def test_a_wrong_name_is_answered_with_the_nearest(wrong, near):
    with pytest.raises(UnknownName) as caught:
        registry.get(wrong)
    assert near in caught.value.near
    assert f'no implementation called "{wrong}". Near: ' in str(caught.value)
    assert "attnbench list implementations" in str(caught.value)


def test_a_third_party_that_cannot_be_loaded_is_named(monkeypatch):
    def load():
        raise ImportError("libfoo.so.1 not found")

    points = {"torch.foo": SimpleNamespace(load=load, value="foo:FOO", dist=None)}
    points["torch.bar"] = SimpleNamespace(load=lambda: Mine(), value="bar:BAR", dist=None)
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    with pytest.raises(UsageError, match=r"torch.foo.*foo:FOO.*libfoo.so.1"):
        registry.get("torch.foo")
    with pytest.raises(UsageError, match=r"torch.bar.*is not an Implementation of that name"):
        registry.get("torch.bar")


def test_a_function_stands_for_itself():
    def attend(q, k, v):
        return v

    found = resolve(attend, "numpy")
    assert (found.name, found.framework, found.layout) == ("attend", "numpy", "bshd")
    assert found.build(WORKLOAD, {}) is attend
    mine = Mine()
    assert resolve(mine) is mine
    with pytest.raises(UsageError, match="not int"):
        resolve(3)


def test_a_callable_object_is_named_after_its_class():
    class Kernel:
        def __call__(self, q, k, v):
            return v

    assert resolve(Kernel()).name == "Kernel"


@pytest.fixture
def kernel_file(tmp_path, monkeypatch):
    file = tmp_path / "my_kernel.py"
    file.write_text("def my_attention(q, k, v):\n    return v\n\nNUMBER = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield file
    sys.modules.pop("my_kernel", None)


def test_a_file_and_a_module_reference(kernel_file):
    found = resolve(f"{kernel_file}:my_attention", "numpy")
    assert isinstance(found, Function)
    assert found.name == "my_attention"
    assert found.function(1, 2, 3) == 3
    assert resolve("my_kernel:my_attention", "numpy").function(1, 2, 3) == 3
    assert load_reference("attnbench.impls.numpy:FLOAT32").name == "numpy.float32"


def test_wrong_references_say_what_is_wrong(kernel_file, tmp_path):
    with pytest.raises(UnknownName, match="Near: my_attention"):
        load_reference(f"{kernel_file}:my_atention")
    with pytest.raises(UnknownName) as caught:
        load_reference(f"{kernel_file}:zzz")
    assert str(caught.value).startswith(f'no function in {kernel_file} called "zzz". Known: ')
    assert "See" not in str(caught.value)
    with pytest.raises(UsageError, match="is a int, not a function"):
        load_reference(f"{kernel_file}:NUMBER")
    with pytest.raises(UsageError, match="there is no file"):
        load_reference(f"{tmp_path}/nothing.py:f")
    with pytest.raises(UsageError, match="ModuleNotFoundError"):
        load_reference("no_such_module_at_all:f")
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    with pytest.raises(UsageError, match="SyntaxError"):
        load_reference(f"{broken}:f")


def test_settings_in_brackets():
    assert registry.asked("torch.sdpa") == ("torch.sdpa", {})
    asked = registry.asked("torch.ring[world=4, layout=striped,timeout_s=5]")
    assert asked == ("torch.ring", {"world": 4, "layout": "striped", "timeout_s": 5.0})
    for name in ("torch.ring[inner=torch.eager]", "jax.ring[world=0]", "torch.gemma-stack-auto[impl=torch.sdpa]"):
        assert registry.asked(name)[1]
    assert registry.asked("jax.pi0-block-flash[impl=jax]") == ("jax.pi0-block-flash", {"impl": "jax"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torch.ring[speed=3]", 'no setting "speed"; it has world, layout'),
        ("torch.sdpa[world=2]", "it has none"),
        ("torch.ring[world=2", "no closing bracket"),
        ("torch.ring[world=many]", "takes a value of type int"),
        ("torch.ring[world=0]", "world must be a whole number of at least 1, not 0"),
        ("torch.ring[world=2,layout=foo]", 'layout "foo" is not one of contiguous, zigzag, striped'),
        ("torch.ring[inner=torch.egaer]", 'no implementation called "torch.egaer". Near: torch.eager'),
        ("torch.ring-templated[layout=foo]", 'layout "foo" is not one of'),
        ("jax.ring[world=-1]", "world must be a whole number (0 means every device), not -1"),
        ("jax.all-gather[layout=foo]", 'layout "foo" is not one of'),
        ("torch.chunked[chunk=0]", "chunk must be a whole number of at least 1, not 0"),
        ("jax.pi0-attention-flash[impl=foo]", 'no flash_attention_impl called "foo". Known: auto, cudnn,'),
        ("jax.gemma-stack-flash[impl=foo]", 'no flash_attention_impl called "foo"'),
        ("torch.gemma-stack-auto[impl=foo]", 'no implementation called "foo"'),
        ("torch.gemma-stack-auto[impl=jax.xla]", "takes an attention implementation of torch, not jax.xla"),
        ("torch.rong[world=2]", 'no implementation called "torch.rong"'),
    ],
)
def test_settings_that_mean_nothing(text, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        registry.asked(text)


def test_one_registered_by_hand_under_a_known_name_is_not_ours(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    assert registry.origin("numpy.float32") == registry.OURS
    registry.register(Function(lambda q, k, v: q, "numpy", "numpy.float32"))
    assert registry.origin("numpy.float32") == registry.HERE
    assert group_of(registry.get("numpy.float32")).has_user_code


def test_what_is_built_from_a_name_is_forgotten_when_it_is_registered_again():
    calls = []

    @registry.cached(8)
    def built(name: str) -> int:
        calls.append(name)
        return len(calls)

    assert [built("a"), built("a")] == [1, 1]
    with registry.restored():
        registry.register(registry.Function(lambda q, k, v: q, "numpy", "mine"))
        assert [built("a"), built("a")] == [2, 2]
    assert built("a") == 3
