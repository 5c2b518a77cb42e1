"""Imports point one way: the table of docs/architecture.md, enforced."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "clusterenv"

# Who may import whom. A name is a package, or a module directly under clusterenv.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "rollout": set(),
    "wire": {"errors", "config"},
    "policy": {"errors", "config"},
    "head": {"errors", "config", "rollout", "wire", "policy", "launchers.base"},
    "worker": {"errors", "config", "wire", "policy", "recording.pieces"},
    "launchers": {"errors", "config", "wire.ticket"},
    "adapters": {"errors", "policy", "setup.factories"},
    "setup": {"errors", "config", "head", "launchers.base", "wire", "worker.making", "worker.shard"},
    "actions": {"wire.layout"},
    "resets": set(),
    "ownership": {"errors"},
    "evaluation": {"errors", "config", "head", "policy", "wire"},
    "inline": {
        "head.acting", "head.dealer", "head.evaluating", "head.outcome", "head.worker", "policy", "rollout", "wire",
        "worker.episode_player", "worker.infos", "worker.making", "worker.shard",
    },
    "vector": {"errors", "actions", "head", "inline", "ownership", "resets", "setup.sample", "wire.layout"},
    "env": {
        "errors", "config", "rollout", "evaluation", "head", "launchers", "policy", "adapters", "setup", "actions",
        "inline", "vector", "wire.buffers",
    },
    "scalars": {"errors"},
    "entry_points": {"errors", "env", "setup.factories"},
    "doctor": {"errors", "config", "launchers", "wire", "env"},
    "testing": {"errors"},
    "recording": {"errors", "rollout", "env", "wire.layout", "wire.spaces", "wire.values"},
    "cli": {"errors", "config", "launchers", "wire.ticket", "doctor", "env", "evaluation", "recording", "testing"},
    "__main__": {"cli"},
}  # fmt: skip

# Inside the head: from the record of a worker up to streams.
HEAD: dict[str, set[str]] = {
    "worker": set(),
    "outcome": set(),
    "interrupts": set(),
    "failure": {"worker"},
    "infos": {"failure", "outcome", "worker"},
    "mailboxes": {"worker"},
    "joining": {"worker"},
    "liveness": {"worker"},
    "machines": {"worker"},
    "calls": {"interrupts", "joining", "liveness", "mailboxes", "worker"},
    "packages": {"worker"},
    "pending": {"calls", "failure", "outcome", "worker"},
    "attendance": set(),
    "supervisor": {"attendance", "worker"},
    "preparation": {"calls", "infos", "machines", "packages", "pending", "worker"},
    "workers": {"calls", "failure", "infos", "machines", "outcome", "pending", "preparation", "supervisor", "worker"},
    "acting": {"calls", "failure", "infos", "machines", "outcome", "pending", "worker", "workers"},
    "dealer": set(),
    "evaluating": {"acting", "dealer", "failure", "infos", "pending", "worker", "workers"},
    "remote": {"evaluating", "failure", "infos", "outcome", "pending", "worker", "workers"},
    "stats": {"outcome"},
    "versions": {"stats", "worker"},
    "rollouts": {"failure", "infos", "outcome", "stats", "versions", "worker"},
    "stream": {"failure", "infos", "remote", "rollouts", "worker"},
    "exchange": {"outcome", "worker"},
}

FRAMEWORKS = {"torch", "jax", "ray", "kubernetes", "matplotlib", "stable_baselines3", "envpool", "tensorflow"}


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem not in ("__init__",))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            module = node.module or ""
            # `from clusterenv.wire import messages` imports the module clusterenv.wire.messages.
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def test_a_module_imports_only_what_the_table_allows() -> None:
    for path in modules():
        name = name_of(path)
        group = name.split(".")[0]
        allowed = ALLOWED[group] | ({group} if "." in name else {name})
        for target in imports_of(path):
            if not target.startswith("clusterenv."):
                continue
            inner = target.removeprefix("clusterenv.")
            assert any(inner == entry or inner.startswith(f"{entry}.") for entry in allowed), f"{name} imports {inner}"


def test_the_page_has_the_same_table() -> None:
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text()
    table = page.partition("| module | may import |\n|---|---|\n")[2].partition("\n\n")[0]
    stated: dict[str, set[str]] = {}
    for line in table.splitlines():
        _, groups, allowed, _ = line.split("|")
        stated |= {key: set(re.findall(r"`([\w.]+)`", allowed)) for key in re.findall(r"`([\w.]+)`", groups)}
    assert stated == {name: allowed for name, allowed in ALLOWED.items() if name != "__main__"}


def test_only_adapters_and_a_launcher_of_that_name_import_a_framework() -> None:
    for path in modules():
        name = name_of(path)
        # A rollout's `to_torch` imports it when it is called; tests/test_import.py sees that nothing else does.
        if name.startswith("adapters.") or name == "rollout":
            continue
        used = {target.split(".")[0] for target in imports_of(path)} & FRAMEWORKS
        assert all(name.startswith(f"launchers.{framework}") for framework in used), f"{name} imports {used}"


def test_the_head_is_built_in_layers() -> None:
    for name, below in HEAD.items():
        inner = {target.split(".")[2] for target in imports_of(SOURCE / "head" / f"{name}.py") if ".head." in target}
        assert inner <= below, f"head.{name} imports {inner - below}"


def test_every_module_of_the_head_has_its_layer() -> None:
    assert {path.stem for path in (SOURCE / "head").glob("*.py")} - {"__init__"} == set(HEAD)


@pytest.mark.parametrize("name", ["head", "wire"])
def test_the_head_never_unpickles(name: str) -> None:
    for path in [*(SOURCE / name).rglob("*.py"), SOURCE / "env.py"]:
        text = path.read_text()
        assert "pickle.loads" not in text, path
        assert "pickle.load(" not in text, path
        assert "Unpickler" not in text, path
