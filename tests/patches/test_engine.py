"""The engine on stub modules: everything it promises, each promise with a case that breaks it."""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from mindspeed_mamba3_plugin.patches.engine import Engine, Patch, PatchError

OWNER = """
    def double(x, y=0):
        return 2 * x + y

    class Base:
        def inherited(self, x):
            return x

    class Thing(Base):
        limit = 3

        def method(self, x):
            return x

        @staticmethod
        def static(x):
            return x

        @classmethod
        def cls_name(cls, x):
            return cls.__name__, x

    class Other(Thing):
        pass
"""
ON = SimpleNamespace(use=True)


def plus_one(original):
    """A wrapper that adds one to the (last) result."""

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        result = original(*args, **kwargs)
        return (*result[:-1], result[-1] + 1) if isinstance(result, tuple) else result + 1

    return wrapped


def patch(name: str, wrapper=plus_one, **more) -> Patch:
    more.setdefault("flag", "use")
    if "replacement" not in more:
        more["wrapper"] = wrapper
    return Patch(f"owner.mod:{name}", f"reason for {name}", **more)


@pytest.fixture
def mod(stub):
    stub("owner")
    return stub("owner.mod", OWNER)


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.revert()


def entries(mod) -> dict:
    return {
        "double": mod.double,
        **{f"Thing.{n}": vars(mod.Thing).get(n) for n in ("limit", "method", "static", "cls_name", "inherited")},
        **{f"Base.{n}": vars(mod.Base)[n] for n in ("inherited",)},
    }


def assert_original(mod, before: dict) -> None:
    after = entries(mod)
    assert all(after[n] is before[n] for n in before), [n for n in before if after[n] is not before[n]]


def test_wraps_and_reverts_every_kind_of_symbol_by_identity(mod, engine):
    before, thing = entries(mod), mod.Thing()
    names = ("double", "Thing.method", "Thing.static", "Thing.cls_name", "Thing.inherited")
    assert engine.apply([patch(n) for n in names]) == tuple(f"owner.mod:{n}" for n in names)
    assert mod.double(2, y=1) == 6
    assert thing.method(1) == thing.inherited(1) == mod.Thing.static(1) == thing.static(1) == 2
    assert mod.Thing.cls_name(1) == ("Thing", 2)
    assert mod.Other.cls_name(1) == ("Other", 2)
    assert mod.Base().inherited(1) == 1, "only the named class changes"
    assert isinstance(vars(mod.Thing)["static"], staticmethod)
    assert isinstance(vars(mod.Thing)["cls_name"], classmethod)

    assert engine.revert() == tuple(f"owner.mod:{n}" for n in reversed(names))
    assert_original(mod, before)
    assert "inherited" not in vars(mod.Thing)
    assert engine.applied == ()


def test_replaces_a_class_attribute_and_an_attribute_of_an_object(mod, engine):
    mod.holder = SimpleNamespace(inner=SimpleNamespace(value=[1]))
    value = mod.holder.inner.value
    engine.apply([patch("Thing.limit", replacement=5), patch("holder.inner.value", wrapper=lambda v: [*v, 2])])
    assert mod.Other.limit == 5
    assert mod.holder.inner.value == [1, 2]
    engine.revert()
    assert mod.Other.limit == 3
    assert mod.holder.inner.value is value


def test_rebinds_names_imported_earlier(mod, stub, engine):
    early = stub(
        "early",
        """
        from owner.mod import Thing, double, double as renamed
        bound = Thing.cls_name
        static = Thing.static
        unrelated = 1
        """,
    )
    before = dict(vars(early))
    engine.apply([patch("double"), patch("Thing.cls_name"), patch("Thing.static")])
    assert early.double is early.renamed is mod.double
    assert early.renamed(2) == 5
    assert early.bound(1) == ("Thing", 2)
    assert early.static(1) == 2

    mine = early.renamed = lambda x: x
    engine.revert()
    assert early.renamed is mine, "a name that its owner has bound anew is left alone"
    assert all(vars(early)[n] is before[n] for n in ("double", "bound", "static", "unrelated"))


def test_replaces_a_class_captured_in_a_module_spec(mod, engine):
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = ModuleSpec(module=mod.Thing)
    other = ModuleSpec(module=mod.Other)
    original, new = mod.Thing, type("New", (), {})
    engine.apply([patch("Thing", replacement=new)])
    assert spec.module is mod.Thing is new
    assert other.module is mod.Other
    engine.revert()
    assert spec.module is mod.Thing is original


def test_applying_twice_changes_nothing_more(mod, engine):
    p = patch("double")
    assert engine.apply([p]) == ("owner.mod:double",)
    once = mod.double
    assert engine.apply([p]) == ()
    assert mod.double is once
    assert mod.double(2) == 5
    with pytest.raises(PatchError, match=r"owner\.mod:double: .* already, for 'reason for double'; revert"):
        engine.apply([Patch("owner.mod:double", "another", "use", wrapper=plus_one)])
    engine.revert()
    assert engine.revert() == ()


def test_the_same_symbol_twice_in_one_list_is_refused(mod, engine):
    before = entries(mod)
    with pytest.raises(PatchError, match="patched twice"):
        engine.apply([patch("double"), patch("double")])
    assert_original(mod, before)


@pytest.mark.parametrize("forge", [functools.wraps, lambda original: lambda f: f], ids=["wraps", "plain"])
def test_refuses_what_somebody_else_replaced_before(mod, stub, engine, forge):
    """Even when functools.wraps gives the other party's function the name and signature of the original."""
    other = stub(
        "other_party", "def make(original, forge):\n @forge(original)\n def theirs(x, y=0): return 7\n return theirs"
    )
    mod.double = theirs = other.make(mod.double, forge)
    p = patch("double", parameters=("x", "y"))
    with pytest.raises(PatchError, match=r"owner\.mod:double: other_party\.theirs .* mindspeed_mamba3_plugin"):
        engine.apply([p])
    assert mod.double is theirs
    (status,) = engine.report([p], ON)
    assert status.state == "refused"
    assert "other_party.theirs" in status.why


def test_refuses_to_revert_below_somebody_elses_patch(mod, stub, engine):
    other = stub("other_party", "def theirs(x, y=0): return 7")
    before = entries(mod)
    patches = [patch("double", parameters=("x", "y")), patch("Thing.method", parameters=("self", "x"))]
    engine.apply(patches)
    ours, mod.double = mod.double, other.theirs
    message = r"owner\.mod:double: other_party\.theirs has replaced the patch of mindspeed_mamba3_plugin"
    with pytest.raises(PatchError, match=message):
        engine.revert()
    assert vars(mod.Thing)["method"] is not before["Thing.method"], "all or nothing"
    with pytest.raises(PatchError, match=message):
        engine.apply(patches)
    assert [s.state for s in engine.report(patches, ON)] == ["refused", "applied"]
    mod.double = ours
    engine.revert()
    assert_original(mod, before)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("owner.mod:triple", r"owner\.mod has no triple, which mindspeed_mamba3_plugin"),
        ("owner.mod:Thing.absent", r"owner\.mod has no Thing\.absent"),
        ("owner.mod:Absent.method", r"owner\.mod has no Absent\.method"),
        ("owner.absent:double", r"importing owner\.absent failed: No module named 'owner\.absent'"),
        ("broken:double", r"importing broken failed: .*nowhere"),
    ],
)
def test_refuses_a_missing_symbol(mod, engine, tmp_path, monkeypatch, target, message):
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = entries(mod)
    with pytest.raises(PatchError, match=message):
        engine.apply([patch("double"), Patch(target, "r", "use", wrapper=plus_one)])
    assert_original(mod, before)


def test_an_optional_patch_is_left_out_only_where_its_module_is_absent(mod, engine):
    absent = Patch("owner.absent:f", "r", "use", wrapper=plus_one, optional=True)
    assert engine.apply([absent, patch("double")]) == ("owner.mod:double",)
    assert [s.state for s in engine.report([absent], ON)] == ["absent"]
    with pytest.raises(PatchError, match="has no triple"):
        engine.apply([patch("triple", optional=True)])


def test_refuses_another_signature(mod, engine):
    with pytest.raises(PatchError, match=r"owner\.mod:double takes \(x, y\), .* expects \(x, y, z\)"):
        engine.apply([patch("double", parameters=("x", "y", "z"))])
    with pytest.raises(PatchError, match="expects"):
        engine.apply([patch("Thing.cls_name", parameters=("cls", "y"))])
    engine.apply([patch("Thing.cls_name", parameters=("cls", "x"))])


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        ("owner-mod>=2,<3", r"knows owner-mod>=2,<3, installed is owner-mod 1\.4rc1"),
        ("packaging<1", r"installed is packaging \d"),
        ("surely-not-installed>=1", "surely-not-installed is not installed"),
    ],
)
def test_refuses_another_version(mod, engine, requires, message):
    mod.__version__ = "1.4rc1"
    before = entries(mod)
    with pytest.raises(PatchError, match=message):
        engine.apply([patch("double", requires=requires)])
    assert_original(mod, before)
    engine.apply([patch("double", requires="owner-mod>=1.3,<2")])


def test_one_failure_takes_everything_back(mod, stub, engine):
    @dataclass(frozen=True)
    class Frozen:
        value: int = 1

    mod.frozen = Frozen()
    early = stub("early", "from owner.mod import double")
    before, double = entries(mod), mod.double
    with pytest.raises(PatchError, match=r"owner\.mod:frozen\.value: cannot be patched: .*nothing was changed"):
        engine.apply(
            [patch("double"), patch("Thing.static"), patch("frozen.value", replacement=2), patch("Thing.method")]
        )
    assert_original(mod, before)
    assert early.double is double
    assert engine.applied == ()

    engine.apply([patch("Thing.method")])
    with pytest.raises(PatchError):
        engine.apply([patch("Thing.method"), patch("double"), patch("frozen.value", replacement=2)])
    assert engine.applied == ("owner.mod:Thing.method",), "what was applied before the failing call stays"
    assert mod.double is double


def test_a_wrapper_that_fails_is_found_before_anything_changes(mod, engine):
    def refuse(original):
        raise PatchError("not this one")

    before = entries(mod)
    patches = [patch("double"), patch("Thing.method", wrapper=refuse)]
    with pytest.raises(PatchError, match=r"owner\.mod:Thing\.method: .*not this one"):
        engine.apply(patches)
    assert_original(mod, before)
    assert [s.state for s in engine.report(patches, ON)] == ["would apply", "refused"]


def test_refuses_when_instances_were_built_before(mod, engine):
    p = patch("Thing.method", built="owner.mod:Thing")
    thing = mod.Other()
    with pytest.raises(PatchError, match=r"model with 1 Thing was built before: call enable\(\) before"):
        engine.apply([p])
    thing.cycle = thing
    del thing
    engine.apply([p])


def test_many_threads_apply_and_revert(mod, engine):
    """Whatever the order, a caller sees the original or one wrapper; the original is there in the end."""
    before = entries(mod)
    patches = [patch("double"), patch("Thing.static"), patch("Thing.cls_name")]
    start, wrong = threading.Barrier(8), []

    def work(i: int) -> None:
        start.wait()
        for _ in range(5):
            try:
                engine.apply(patches)
                if mod.double(2) not in (4, 5) or mod.Thing.static(1) not in (1, 2):
                    wrong.append("wrapped twice")
                if i % 2:
                    engine.revert()
            except Exception as error:
                wrong.append(repr(error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong, wrong[0]
    engine.apply(patches)
    assert mod.double(2) == 5
    engine.revert()
    assert_original(mod, before)


def test_report_says_what_is_applied_what_would_be_and_why_not(mod, engine):
    applied, off, would = patch("double"), patch("Thing.method", flag="mode", value="fp32"), patch("Thing.static")
    settings = SimpleNamespace(use=True, mode="bf16")
    engine.apply([applied])
    rows = engine.report([applied, off, would], settings)
    assert [(r.target, r.state) for r in rows] == [
        ("owner.mod:double", "applied"),
        ("owner.mod:Thing.method", "off"),
        ("owner.mod:Thing.static", "would apply"),
    ]
    assert rows[1].why == "mode is 'bf16', not 'fp32'"
    assert rows[0].reason == "reason for double"
    assert mod.Thing.static(1) == 1, "a report applies nothing"


def test_a_patch_that_says_nothing_or_two_things_is_no_patch():
    with pytest.raises(ValueError, match="exactly one"):
        Patch("a:b", "r", "f")
    with pytest.raises(ValueError, match="exactly one"):
        Patch("a:b", "r", "f", wrapper=plus_one, replacement=None)
    with pytest.raises(ValueError, match=r"module:dotted\.name"):
        Patch("a.b", "r", "f", wrapper=plus_one)
