"""Which processes there are, as Linux tells."""

from pathlib import Path


def children_of(pid: int) -> set[int]:
    return {int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in _children(task)}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except FileNotFoundError:  # the thread has ended
        return []
