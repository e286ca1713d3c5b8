"""Compiles each size for the slices it is meant for; writes docs/sharding.md's table.

    python benchmarks/compile_table.py --reports=DIR [--only=xxl] [--docs=FILE]

One report per row lies in DIR afterwards; a row that has one isn't compiled again.
Needs libtpu (`pip install -e '.[tpu]'`) and no TPU. Rows without a report are left out
of the table.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
BATCH = ("--batch_size=2048", "--max_length=64", "--num_negatives=0")


@dataclasses.dataclass(frozen=True)
class Row:
    """One compilation.

    Attributes:
        name: of its report.
        gin: the run's file, without folder and ending.
        topology: the slice.
        flags: what differs from the file.
        num_slices: slices of that kind.
        note: what sets the row apart, for the table.
    """

    name: str
    gin: str
    topology: str
    flags: tuple[str, ...] = ()
    num_slices: int = 1
    note: str = ""

    def command(self, report: pathlib.Path) -> list[str]:
        """Returns the command that writes the report."""
        command = [sys.executable, "-m", "sentence_t5.compile"]
        command += [f"--gin_file=gin/{self.gin}.gin", f"--topology={self.topology}"]
        if self.num_slices > 1:
            command += [f"--num_slices={self.num_slices}"]
        return [*command, *BATCH, *self.flags, f"--json={report}"]


def _mesh(**sizes: int) -> tuple[str, ...]:
    return tuple(f"--gin.partitioning.MeshConfig.{k}={v}" for k, v in sizes.items())


_REMAT = ("--gin.config.T5Config.remat='full'",)
_TWO_SLICES = _mesh(data=2, fsdp=-1, num_slices=2)
ROWS = (
    Row("base_v5e_2x2", "st5_base_mean", "v5e:2x2", _REMAT),
    Row(
        "base_v5e_2x2_fsdp", "st5_base_mean", "v5e:2x2",
        _REMAT + _mesh(data=1, fsdp=4),
    ),
    Row("base_v5e_4x4", "st5_base_mean", "v5e:4x4", _REMAT),
    Row(
        "base_v5e_4x4_chunks", "st5_base_mean", "v5e:4x4",
        (*_REMAT, "--gin.engine.trainer.microbatch_size=256"), note="8 chunks",
    ),
    Row(
        "base_v5e_4x4_float32", "st5_base_mean", "v5e:4x4",
        (*_REMAT, "--gin.config.T5Config.grad_dtype='float32'"), note="float32 sums",
    ),
    Row("xl_v5e_4x4", "st5_xl_mean", "v5e:4x4"),
    Row("xxl_v5e_8x8", "st5_xxl_mean", "v5e:8x8"),
    Row(
        "xxl_v5e_8x8_model", "st5_xxl_mean", "v5e:8x8", _mesh(data=1, fsdp=16, model=4)
    ),
    Row("xxl_two_v5e_8x8", "st5_xxl_mean", "v5e:8x8", _TWO_SLICES, 2),
    Row("xxl_v4", "st5_xxl_mean", "v4:4x4x4"),
    Row("xxl_v5p", "st5_xxl_mean", "v5p:4x4x4"),
    Row("xxl_v6e", "st5_xxl_mean", "v6e:8x8"),
)  # fmt: skip


def table(reports: dict[str, dict]) -> str:
    """Writes the reports as a Markdown table."""
    lines = [
        "| size | slice | mesh | fits | peak, GB | state, GB | moved, GB "
        "| at best, ms | pairs/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        if row.name not in reports:
            continue
        report = reports[row.name]
        mesh = " × ".join(f"{k} {v}" for k, v in report["mesh"].items() if v > 1)
        state = report["state_bytes_per_chip"]
        held = (state["parameters"] + state["optimizer"]) / 1e9
        mesh += f", {row.note}" if row.note else ""
        cells = [row.gin.split("_")[1], report["topology"], mesh]
        cells.append("yes" if report["fits"] else "no")
        cells.append(f"{report['memory_bytes'].get('peak', 0) / 1e9:.2f}")
        cells.append(f"{held:.2f}")
        if report["fits"]:
            kinds = report["collective_bytes"].values()
            moved = sum(sum(kind.values()) for kind in kinds) / 1e9
            roofline = report["roofline"]
            cells.append(f"{moved:.2f}")
            cells.append(f"{roofline['step_seconds_at_least'] * 1e3:.1f}")
            cells.append(f"{roofline['per_second_at_most']:,.0f}")
        else:
            cells += ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Compiles what is missing and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reports", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument(
        "--docs", type=pathlib.Path, help="a page with the table's marks"
    )
    flags = parser.parse_args()
    flags.reports.mkdir(parents=True, exist_ok=True)
    reports = {}
    for row in ROWS:
        path = flags.reports / f"{row.name}.json"
        if not path.exists() and flags.only in row.name:
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            subprocess.run(row.command(path), check=False)
        if path.exists():
            reports[row.name] = json.loads(path.read_text())
    text = table(reports)
    print(text)
    if flags.docs:
        page = flags.docs.read_text()
        before, rest = page.split(BEGIN)
        _, after = rest.split(END)
        flags.docs.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
