"""The trainers against their peers: each section measures both in one run, on the same data and cores.

    python -m benchmarks.trainers                            every section, each in the image it belongs to
    python -m benchmarks.trainers gpt resnet                 some of them; see --help
    python -m benchmarks.trainers gpt resnet --device cuda --inside    here: on a machine with torch and a GPU

Outside, `trainyard dev dataset` writes a section's data to a temporary folder and the section runs in a container of
its image, without a network, this checkout mounted. The table goes to stderr, JSON to stdout; ``--save`` keeps a
section's figures in benchmarks/results/trainers-<device>.json and writes the table of all that are there beside it, so
that a small machine can measure one section at a time.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import sections
from benchmarks.sections import Result, Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def inside(name: str, data: Path, device: str, rounds: int) -> dict[str, Any]:
    """Measure section ``name`` in this process's own environment."""
    found: Result = sections.load(name).measure(data, device, rounds)
    return {"section": name, **asdict(found), "machine": machine(device)}


def machine(device: str) -> dict[str, str]:
    """What the figures hold for: processor, cores, accelerator, versions, date."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = {
        "cpu": (models or [platform.machine()])[0],
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
    }
    for package in ("torch", "torchvision", "tensorflow-cpu", "tensorflow", "jax", "flax", "pillow"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        import torch

        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    return {**found, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}


def write_data(name: str, folder: Path) -> None:
    """Write the data of section ``name``, readable for the image's user."""
    if words := sections.load(name).DATA:
        command = [sys.executable, "-m", "trainyard", "dev", "dataset", words[0], str(folder), *words[1:]]
        path = f"{ROOT / 'scripts'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env={**os.environ, "PYTHONPATH": path})
    for written in (folder, *folder.rglob("*")):
        written.chmod(0o755 if written.is_dir() else 0o644)


def outside(name: str, image: str, device: str, rounds: int) -> dict[str, Any]:
    """Measure section ``name`` in a container of ``image`` (default: the section's own target)."""
    image = image or f"trainyard:{sections.load(name).TARGET}"
    with tempfile.TemporaryDirectory() as folder:
        write_data(name, Path(folder))
        command = [
            "docker", "run", "--rm", "--pull=never", "--network=none", "--shm-size=2g",
            "--entrypoint=/opt/venv/bin/python", *(["--gpus=all"] if device == "cuda" else []),
            f"--volume={ROOT}:/src:ro", f"--volume={folder}:/data:ro", "--workdir=/tmp", "--env=PYTHONPATH=/src",
            "--env=PYTHONDONTWRITEBYTECODE=1", image, "-m", "benchmarks.trainers", name, "--inside", "--json",
            "--data=/data", f"--device={device}", f"--rounds={rounds}",
        ]  # fmt: skip
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            sys.exit(f"section {name} failed in {image}; its words are above")
        found: list[dict[str, Any]] = json.loads(ended.stdout)
    return found[0]


def table(found: list[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table, and what they were measured on; spread is that of the peer's rounds."""
    lines = ["| section | what | ours | peer | spread | ratio | target |", "|---|---|---|---|---|---|---|"]
    for section in found:
        for entry in section["rows"]:
            row = Row(**entry)
            target = f">= {row.target:g} {row.verdict}" if row.target else "-"
            spread = f"{row.spread:.0%}" if row.spread else "-"
            lines.append(
                f"| {section['section']} | {row.what} | {row.ours:.4g} {row.unit}"
                f" | {row.against}: {row.peer:.4g} {row.unit} | {spread} | {row.ratio:.2f} | {target} |"
            )
    lines.append("")
    for section in found:
        on = ", ".join(f"{key} {value}" for key, value in section["machine"].items())
        lines.append(f"- {section['section']} was measured on {on}.")
    return "\n".join(lines)


def document(found: list[dict[str, Any]], device: str) -> str:
    """The Markdown file of the figures ``found`` on ``device``."""
    source = f"Written by `python -m benchmarks.trainers --device {device} --save`."
    spread = (
        "Ratios are medians of rounds by turns. Spread: the difference of the highest and the lowest round of the peer,"
        " by its\nmedian. Where it exceeds the margin to the target, there is no verdict."
    )
    return f"# The trainers against their peers ({device})\n\n{source}\n{spread}\n\n{table(found)}\n"


def save(found: list[dict[str, Any]], device: str, folder: Path = RESULTS) -> None:
    """Keep ``found`` in ``folder`` beside what was measured of other sections, and write the table of all."""
    path = folder / f"trainers-{device}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    sections_by_name = {section["section"]: section for section in [*kept, *found]}
    every = [sections_by_name[name] for name in sorted(sections_by_name)]
    path.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(document(every, device), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.trainers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(sections.names())}; default: all"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="what to train on (default cpu)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="seeds, or repetitions of which the best counts (default 3)"
    )
    parser.add_argument("--image", default="", help="measure in this image (default: trainyard:<the section's target>)")
    parser.add_argument("--inside", action="store_true", help="measure in this very environment, without a container")
    parser.add_argument("--data", type=Path, help="with --inside: the data; default: written anew")
    parser.add_argument("--json", action="store_true", help="only the JSON, no table")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results/")
    args = parser.parse_args()
    unknown = set(args.sections) - set(sections.names())
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}: there is {', '.join(sections.names())}")
    found = []
    for name in args.sections or sections.names():
        if args.device not in sections.load(name).DEVICES:
            print(f"{name}: is not measured on {args.device}", file=sys.stderr)
        elif not args.inside:
            found.append(outside(name, args.image, args.device, args.rounds))
        else:
            with tempfile.TemporaryDirectory() as folder:
                if not args.data:
                    write_data(name, Path(folder))
                found.append(inside(name, args.data or Path(folder), args.device, args.rounds))
        if args.save:  # at once, as a later section may fail
            save(found, args.device)
    if not args.json:
        print(table(found), file=sys.stderr)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
