"""How a server starts in a real terminal: a bar while the model loads, log lines of both processes, and a summary."""

import sys

from support.tmux import needs_tmux, terminal

pytestmark = needs_tmux


def test_log_lines_leave_nothing_of_the_bar_and_the_summary_fits(tmp_path):
    serve = (
        sys.executable,
        "-m",
        "everwarm",
        "serve",
        "--demo",
        "--port",
        "0",
        "--state-dir",
        str(tmp_path / "states"),
    )
    with terminal(*serve, folder=tmp_path, width=80) as screen:
        screen.wait_for("page at /")
        lines = screen.text.splitlines()
    logged = [line for line in lines if " INFO " in line]
    assert len(logged) >= 2, "neither process has said anything"
    assert all(line.startswith("20") for line in logged), logged
    assert "━" not in "".join(lines), "the bar stays"
    begins = lines.index(next(line for line in lines if line.startswith("· everwarm-tiny")))
    assert len(lines) > begins + 6 and all(line.startswith("  ") for line in lines[begins + 1 :])
