"""Make the pictures of the terminal in docs/pictures, of a demo that runs meanwhile.

The product's own screens, filled by what real nodes say, drawn by rich as SVG. It takes as long as
`swarm-node demo`; names of hosts and paths do not get into the pictures.

    python scripts/make_pictures.py
"""

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console, RenderableType

from swarm.control import control_request
from swarm.demo.nodes import Running, node_data_dir, volunteers
from swarm.demo.task import DemoOptions
from swarm.demo.views import draw_curves, live_view, summary_table
from swarm.status import node_view, swarm_view

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURES)
    parser.add_argument("--steps", type=int, default=120, help="of the slowest node")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pictures") as folder:
        out = Path(folder) / "demo"
        started = time.monotonic()
        demo = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "swarm.cli",
                "demo",
                "--out",
                out,
                "--steps",
                str(options.steps),
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            running = [
                Running(volunteer, demo, node_data_dir(out, volunteer.name))
                for volunteer in volunteers(DemoOptions())
            ]
            while min(node.training.get("step", 0) for node in running) < options.steps * 2 // 3:
                time.sleep(1.0)
                for node in running:
                    node.poll()
            elapsed = time.monotonic() - started
            draw(live_view(running, options.steps, elapsed, "ftis"), "demo", 150, options.out)
            small = running[0]
            small.status["model"]["path"] = small.volunteer.model.name
            draw(node_view(small.status, width=110), "status", 110, options.out)
            invite = control_request(small.data_dir.control_socket, "invite")["invite"]
            shown = subprocess.run(
                [sys.executable, "-m", "swarm.cli", "status", invite, "--json"],
                stdout=subprocess.PIPE,
                check=True,
            )
            view = swarm_view(json.loads(shown.stdout), width=130)
            draw(view, "swarm", 130, options.out)
            demo.wait()
        finally:
            demo.terminate()
            demo.wait()
        results = json.loads((out / "results.json").read_text())
    draw(summary_table(results), "summary", 125, options.out)
    draw_curves(results, options.out / "curves.png")


def draw(screen: RenderableType, name: str, width: int, out: Path) -> None:
    """Write one screen as SVG, with a font that every reader has, not one from the net."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(screen)
    svg = console.export_svg(title=f"swarm-node {name}")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "monospace")
    (out / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
