"""The command `clusterenv`: workers by hand, what a launcher would run, doctor, evaluate, merge, chaos."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import json
import logging
import os
import re
import signal
import sys
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import clusterenv
from clusterenv.config import thread_variables, usable_cores
from clusterenv.errors import ClusterEnvError, ConfigError
from clusterenv.launchers.kubernetes.launcher import KubernetesLauncher
from clusterenv.launchers.local import LocalLauncher
from clusterenv.launchers.ray import RayLauncher
from clusterenv.launchers.slurm import SlurmLauncher
from clusterenv.launchers.ssh import SSHLauncher
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE

Recipe = Callable[..., Any]  # A launcher's class.

LAUNCHERS: dict[str, tuple[Recipe, str]] = {
    "local": (LocalLauncher, "workers as child processes on this machine"),
    "slurm": (SlurmLauncher, "workers by Slurm, in a job of their own or in the one this runs in"),
    "ssh": (SSHLauncher, "workers on machines you can log in to with ssh"),
    "kubernetes": (KubernetesLauncher, "workers as Pods on Kubernetes"),
    "ray": (RayLauncher, "workers as actors of a Ray cluster"),
}
_LOOK_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parsed = _parse(list(sys.argv[1:] if arguments is None else arguments))
    try:
        return int(parsed.run(parsed))
    except ClusterEnvError as error:
        print(f"clusterenv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _make_parser()
    # `clusterenv doctor --env X` is about this machine, like `clusterenv doctor`.
    is_left_out = arguments[:1] == ["doctor"] and arguments[1:2] not in ([], ["-h"], ["--help"])
    is_left_out = is_left_out and arguments[1].startswith("-")
    if arguments == ["doctor"] or is_left_out:
        arguments.insert(1, "local")
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        named = next((word for word in unknown if word in LAUNCHERS), None) if is_left_out else None
        remedy = f"; the launcher comes first: clusterenv doctor {named} ..." if named else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{remedy}")
    return parsed


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="clusterenv", description="Gymnasium environments on many processes and machines."
    )
    parser.add_argument("--version", action="version", version=f"clusterenv {clusterenv.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_worker(commands)
    _add_launch(commands)
    _add_doctor(commands)
    _add_evaluate(commands)
    _add_chaos(commands)
    _add_merge(commands)
    return parser


def _add_worker(commands: Any) -> None:
    worker = commands.add_parser(
        "worker",
        help="run one worker with a ticket file",
        description="Run one worker, here, for the head that wrote the ticket file (ClusterEnv with a ByHandLauncher). "
        "It ends when the head tells it to or is gone.",
    )
    worker.add_argument("--ticket", type=Path, required=True, metavar="FILE", help="the head's ticket file, or a copy")
    worker.add_argument(
        "--index",
        type=int,
        metavar="N",
        help="which worker this is: 0, 1, ... each once. By default what the scheduler says: $CLUSTERENV_WORKER, "
        "$SLURM_PROCID, $OMPI_COMM_WORLD_RANK, $PMI_RANK, $PBS_ARRAY_INDEX, $JOB_COMPLETION_INDEX, $SGE_TASK_ID - 1 or "
        "$LSB_JOBINDEX - 1",
    )
    worker.add_argument(
        "--cpus",
        type=int,
        default=1,
        metavar="N",
        help="threads of BLAS, OpenMP and torch, unless $OMP_NUM_THREADS and its like are set (default: 1)",
    )
    worker.set_defaults(run=_run_worker)


def _run_worker(arguments: argparse.Namespace) -> NoReturn:
    from clusterenv.launchers.by_hand import find_index, read_ticket

    ticket = read_ticket(arguments.ticket)
    worker_index = find_index(os.environ) if arguments.index is None else arguments.index
    environment = {
        **thread_variables(arguments.cpus),
        **os.environ,
        TICKET_VARIABLE: ticket.encode(),
        WORKER_VARIABLE: str(worker_index),
    }
    # Once more from the start: the libraries that are loaded by now have already chosen their number of threads.
    os.execve(sys.executable, [sys.executable, "-m", "clusterenv.worker"], environment)


def _add_launch(commands: Any) -> None:
    launch = commands.add_parser(
        "launch",
        help="show what a launcher would run, or run it for a ticket file",
        description="Show what a launcher would run, or start workers for a head that waits elsewhere with a "
        "ByHandLauncher. A head that starts its own workers needs no command: ClusterEnv(launcher=...).",
    )
    kinds = launch.add_subparsers(required=True, metavar="LAUNCHER")
    for name, (recipe, text) in LAUNCHERS.items():
        kind = kinds.add_parser(name, help=text, description=f"Start {text}.")
        add_options(kind, recipe)
        _add_num_workers(kind)
        choice = kind.add_mutually_exclusive_group(required=True)
        choice.add_argument("--dry-run", action="store_true", help="show the commands, and run nothing")
        choice.add_argument(
            "--ticket", type=Path, metavar="FILE", help="start workers for the head that wrote this, until they end"
        )
        if recipe is KubernetesLauncher:
            choice.add_argument(
                "--head",
                type=Path,
                metavar="SCRIPT",
                help="print a Job that runs a script as a head in the cluster, with the rights it needs, for kubectl "
                "apply",
            )
            kind.add_argument(
                "--indexed-job",
                action="store_true",
                help="print one Job of all workers and the Secret with their ticket, for kubectl apply",
            )
        kind.set_defaults(run=_run_launch, launcher=name, head=None, indexed_job=False)


def _run_launch(arguments: argparse.Namespace) -> int:
    from clusterenv.launchers.by_hand import read_ticket

    launcher = make_launcher(LAUNCHERS[arguments.launcher][0], arguments)
    num_workers = _count_workers(arguments, launcher)
    if arguments.head is not None:
        print(launcher.render_head(arguments.head))
        return 0
    if arguments.indexed_job:
        ticket = None if arguments.dry_run else read_ticket(arguments.ticket)
        print(launcher.render_indexed_job(num_workers, ticket))
        return 0
    if arguments.dry_run:
        print(launcher.render(num_workers))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    fleet = launcher.launch(read_ticket(arguments.ticket), num_workers)
    said = None
    try:
        while len(exits := fleet.exits()) < num_workers:
            status = fleet.status()
            if status != said:
                print(status or f"{num_workers} workers started", flush=True)
                said = status
            time.sleep(_LOOK_S)
        if said != "":
            print(f"{num_workers} workers started")  # And ended before anybody looked.
        for worker_index, how in sorted(exits.items()):
            print(f"worker {worker_index} ended: {how}\n{fleet.log_tail(worker_index)}".rstrip())
        return 0 if all(how.startswith("exit status 0") for how in exits.values()) else 1
    finally:
        fleet.stop(timeout_s=5.0)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check that workers can start, reach this machine and run your environment",
        description="Start workers as a training script on this machine would, and check all that a run needs: whether "
        "they start, reach this machine, have the same versions, can make your environment and share the cores well; "
        "then measure how fast messages travel. Ends with status 0 if all is well and with 1 if not; "
        "what is not comes with the next step to take.",
    )
    kinds = doctor.add_subparsers(required=True, metavar="LAUNCHER")
    for name, (recipe, text) in LAUNCHERS.items():
        kind = kinds.add_parser(name, help=text, description=f"Check {text}.")
        add_options(kind, recipe, env="variable")
        _add_num_workers(kind)
        kind.add_argument(
            "--env",
            dest="env_id",
            metavar="ID",
            help="an environment that must work there: CartPole-v1, or my_module:MyEnv-v0",
        )
        kind.add_argument("--listen", metavar="ADDRESS", help="as ClusterEnv(network=Network(listen=...))")
        kind.add_argument("--advertise", metavar="ADDRESS", help="as ClusterEnv(network=Network(advertise=...))")
        kind.add_argument(
            "--timeout",
            type=float,
            default=120.0,
            metavar="SECONDS",
            help="how long workers may take to join, time in a queue included (default: 120)",
        )
        kind.set_defaults(run=_run_doctor, launcher=name)


def _run_doctor(arguments: argparse.Namespace) -> int:
    from clusterenv.doctor.examination import examine

    launcher = make_launcher(LAUNCHERS[arguments.launcher][0], arguments)
    is_well = True
    for finding in examine(
        launcher,
        _count_workers(arguments, launcher),
        env_id=arguments.env_id,
        addresses=(arguments.listen, arguments.advertise),
        join_s=arguments.timeout,
    ):
        print(finding, flush=True)
        is_well = is_well and finding.is_ok
    return 0 if is_well else 1


def _add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="let a policy play episodes on this machine, each once, and show what it reaches",
        description="Play whole episodes with a policy on worker processes of this machine, as ClusterEnv.evaluate "
        "does: episode i from the seed SEED + i, none twice, and the same table for any number of workers.",
    )
    evaluate.add_argument("--env", required=True, metavar="ID", help="CartPole-v1, or my_module:MyEnv-v0")
    evaluate.add_argument(
        "--policy",
        required=True,
        metavar="MODULE:NAME",
        help="a function from observations to actions, an agent, or what makes one when it is called without arguments",
    )
    evaluate.add_argument("--episodes", type=_read_count, default=100, metavar="N", help="how many (default: 100)")
    evaluate.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the first episode (default: 0)")
    evaluate.add_argument("--max-steps", type=_read_count, metavar="N", help="truncate episodes that take longer")
    evaluate.add_argument("--deterministic", action="store_true", help="take the most likely action, or the mean")
    evaluate.add_argument(
        "--resume", type=Path, metavar="FILE", help="write each episode down here, and do not play what it holds again"
    )
    evaluate.add_argument(
        "--workers", type=int, metavar="N", help="how many processes (default: one per core; 0: this one)"
    )
    evaluate.add_argument(
        "--num-envs", type=_read_count, metavar="N", help="how many environments at a time (default: 8 per worker)"
    )
    evaluate.add_argument("--json", action="store_true", help="print the table and its manifest as JSON")
    evaluate.set_defaults(run=_run_evaluate)


def _run_evaluate(arguments: argparse.Namespace) -> int:
    import gymnasium

    from clusterenv.env import ClusterEnv

    agent = find_policy(arguments.policy)
    num_workers = usable_cores() if arguments.workers is None else arguments.workers
    num_envs = arguments.num_envs or 8 * max(1, num_workers)
    try:
        envs = ClusterEnv(arguments.env, num_envs, num_workers=min(num_workers, num_envs))
    except gymnasium.error.Error as error:
        raise ConfigError(f"--env {arguments.env}: {error}") from error
    with envs:
        evaluation = envs.evaluate(
            agent,
            arguments.episodes,
            seed=arguments.seed,
            max_steps=arguments.max_steps,
            deterministic=arguments.deterministic,
            resume=arguments.resume,
        )
    print(json.dumps(evaluation.to_dict()) if arguments.json else evaluation)
    return 0


def find_policy(name: str) -> Any:
    """Return the agent that MODULE:NAME means; a class or a function without arguments is called for it.

    Raises:
        ConfigError: There is no such module, or nothing of that name in it.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"--policy must be MODULE:NAME, such as my_agent:policy, got {name!r}.")
    here = os.getcwd()
    sys.path.insert(0, here)  # As `python -m` has it.
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise ConfigError(f"--policy {name}: the module {module_name} has no {attribute}.")
            found = getattr(found, part)
        return found() if _makes_an_agent(found) else found
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # The module is there: what it imports is not.
        raise ConfigError(f"--policy {name}: there is no module {error.name!r} here, or where Python looks.") from error
    finally:
        sys.path.remove(here)


def _makes_an_agent(found: object) -> bool:
    """Whether something is called without arguments: a policy takes at least the observations."""
    if inspect.isclass(found):
        return True
    if not inspect.isfunction(found):
        return False
    parameters = inspect.signature(found).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _add_chaos(commands: Any) -> None:
    chaos = commands.add_parser(
        "chaos",
        help="kill and freeze the workers of a running script, to see whether it survives",
        description="Kill and freeze the workers of a training script, by a seed, to see whether it survives. Only "
        "workers on this machine, and only processes that are known to be that script's workers. Ends with status 0 if "
        "the script went on, or ended with status 0 itself; with 1 if not.",
        usage="clusterenv chaos [options] --pid PID\n       clusterenv chaos [options] -- python train.py ...",
    )
    chaos.add_argument("--pid", type=int, metavar="PID", help="of the script, or of what has started it")
    chaos.add_argument("--faults", type=int, default=10, metavar="N", help="how many (default: 10)")
    chaos.add_argument(
        "--every", type=float, default=5.0, metavar="SECONDS", help="between two faults, on average (default: 5)"
    )
    chaos.add_argument("--kinds", default="kill,freeze", metavar="KINDS", help="what is done (default: kill,freeze)")
    chaos.add_argument(
        "--freeze",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="how long a worker is frozen (default: 15); one that is for longer than Timeouts.silence_s, 10 by "
        "default, is replaced",
    )
    chaos.add_argument("--seed", type=int, default=0, metavar="N", help="of when, what and to whom (default: 0)")
    chaos.add_argument(
        "--patience",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for workers, at first and after a fault (default: 300)",
    )
    chaos.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="starts the script")
    chaos.set_defaults(run=_run_chaos)


def _run_chaos(arguments: argparse.Namespace) -> int:
    from clusterenv.testing.chaos import Plan, harass_command, harass_process

    plan = Plan(
        num_faults=arguments.faults,
        every_s=arguments.every,
        kinds=tuple(filter(None, arguments.kinds.split(","))),
        freeze_s=arguments.freeze,
        seed=arguments.seed,
        patience_s=arguments.patience,
    )
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if (arguments.pid is None) == (not command):
        raise ConfigError("Give either --pid, of a running script, or a command that starts one: -- python train.py.")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # As under nohup.
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    lines = harass_command(command, plan) if command else harass_process(arguments.pid, plan)
    with contextlib.closing(lines):  # However this ends, what is frozen is thawed.
        while True:
            try:
                print(f"chaos: {next(lines)}", file=sys.stderr, flush=True)
            except StopIteration as end:
                return 0 if end.value else 1


def _add_merge(commands: Any) -> None:
    command = commands.add_parser(
        "merge",
        help="make a Minari dataset of what recorders have written",
        description="Make a Minari dataset of the pieces that a Recorder left where a run was killed, or of those of "
        "several runs. They stay as they are.",
    )
    command.add_argument("pieces", type=Path, nargs="+", metavar="PIECES", help="files, or directories that hold them")
    command.add_argument(
        "--out", type=Path, required=True, metavar="DATASET", help="the dataset's directory, such as datasets/expert-v0"
    )
    command.set_defaults(run=_run_merge)


def _run_merge(arguments: argparse.Namespace) -> int:
    from clusterenv.recording.merging import merge

    print(merge(arguments.pieces, arguments.out))
    return 0


def _add_num_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-workers",
        type=_read_count,
        metavar="N",
        help="how many workers (default: as many as the launcher suggests, or one per core of this machine)",
    )


def _read_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _count_workers(arguments: argparse.Namespace, launcher: Any) -> int:
    return int(arguments.num_workers or launcher.suggested_workers or usable_cores())


def add_options(parser: argparse.ArgumentParser, recipe: Recipe, **others: str) -> None:
    """Give the parser an option for each field of a launcher, `--log-dir` for `log_dir`: what it can do, this can.

    Args:
        parser: For the command.
        recipe: The launcher's class.
        others: Other names for options, where the command has one of the field's name itself.
    """
    hints = typing.get_type_hints(recipe)
    texts = _attribute_texts(recipe)
    for field in dataclasses.fields(recipe):  # type: ignore[arg-type]  # every launcher is a dataclass
        kinds = _kinds(hints[field.name])
        text = texts.get(field.name, "").replace("%", "%%")
        settings: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
        if bool in kinds:
            settings |= {"action": argparse.BooleanOptionalAction}
        elif Mapping in kinds and str not in kinds:  # A text in its place is the path of a file.
            values = "NAME[=VALUE]" if Sequence in kinds else "NAME=VALUE"
            settings |= {"action": "extend", "nargs": "+", "metavar": values}
            text += " One or more."
        elif Sequence in kinds:
            settings |= {"action": "extend", "nargs": "+", "metavar": "TEXT"}
            text += " One or more; for one that begins with a dash, repeat the option with an equals sign."
        else:
            settings |= {"type": _scalar(kinds), "metavar": _scalar(kinds).__name__.upper().replace("STR", "TEXT")}
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        name = others.get(field.name, field.name).replace("_", "-")
        parser.add_argument(f"--{name}", help=text, required=is_required, **settings)


def make_launcher(recipe: Recipe, arguments: argparse.Namespace) -> Any:
    """Make the launcher from what the parser read.

    Raises:
        ConfigError: The launcher refuses a value.
    """
    hints = typing.get_type_hints(recipe)
    settings = {}
    for field in dataclasses.fields(recipe):  # type: ignore[arg-type]  # every launcher is a dataclass
        if not hasattr(arguments, field.name):
            continue
        value = getattr(arguments, field.name)
        kinds = _kinds(hints[field.name])
        if Mapping in kinds and str not in kinds and (Sequence not in kinds or any("=" in item for item in value)):
            value = dict(_read_pair(item, hints[field.name], field.name) for item in value)
        settings[field.name] = value
    return recipe(**settings)


def _kinds(hint: Any) -> set[Any]:
    """Return what a field may hold: classes of scalars, and `Sequence` or `Mapping` for whatever is one."""
    kinds = set()
    for member in _members(hint):
        kind = typing.get_origin(member) or member
        if kind is types.NoneType:
            continue
        if isinstance(kind, type) and issubclass(kind, Mapping):
            kind = Mapping
        elif isinstance(kind, type) and issubclass(kind, Sequence) and not issubclass(kind, str):
            kind = Sequence
        kinds.add(kind)
    return kinds


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _scalar(kinds: set[Any]) -> type:
    for kind in (str, Path, float, int):
        if kind in kinds:
            return kind
    raise TypeError(f"There is no option for a field that holds {kinds}.")


def _read_pair(text: str, hint: Any, name: str) -> tuple[str, Any]:
    """Read NAME=VALUE; NAME alone stands for one, or for true."""
    mapping = next(member for member in _members(hint) if _kinds(member) == {Mapping})
    value_kinds = _kinds(typing.get_args(mapping)[1])
    key, separator, value = text.partition("=")
    if str in value_kinds:
        return key, value if separator else True
    try:
        return key, (float if float in value_kinds else int)(value) if separator else 1
    except ValueError:
        raise ConfigError(f"--{name.replace('_', '-')} {text}: {value!r} is not a number.") from None


def _attribute_texts(recipe: Recipe) -> dict[str, str]:
    """Read what the class's docstring says about each attribute."""
    _, _, attributes = (inspect.getdoc(recipe) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
