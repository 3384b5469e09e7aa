"""Orbax as a run uses it: opens its manager, silences its logs, shortens its errors.

Knows Orbax, and which processes own which devices. Does not know which checkpoint is to be used,
nor what is saved (`checkpoint.py`).
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import process_group
from pat_jax.common.owners import is_absent, owners
from pat_jax.common.pytree import without_shards
from pat_jax.run.checkpoints.files import seal

WRITE_S = 1200  # timeout for another process's part: less than a run's patience
ITEMS = ("state", "meta")
MISTAKES = (OSError, ValueError, RuntimeError)  # its writers raise ValueError for a full disk

UNFINISHED = ".orbax-checkpoint-tmp"  # in the names of unfinished checkpoints

log = logging.getLogger(__name__)


class _Sealed(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Writes the checksums of a checkpoint before renaming it to its final name."""

    async def finalize(self) -> None:
        final = self._final_path
        if UNFINISHED in final.parent.name:  # an item inside of a checkpoint
            await super().finalize()
            return
        self._final_path = final.with_name(f"{final.name}{UNFINISHED}-sealing")
        await super().finalize()
        seal(Path(self._final_path))
        self._final_path = self._final_path.rename(final)


def open_manager(directory: Path, max_to_keep: int) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        directory,
        item_names=ITEMS,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(max_to_keep),
            cleanup_tmp_directories=True,
            temporary_path_class=_Sealed,
            async_options=ocp.AsyncOptions(timeout_secs=WRITE_S),
        ),
    )


def open_writer() -> ocp.Checkpointer:
    """Returns a writer of one folder like a checkpoint, with checksums. It waits until all is
    written."""
    silence()
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(), temporary_path_class=_Sealed)


def reason(error: BaseException) -> tuple[bool, str]:
    """Returns whether this process only timed out, and why a checkpoint was not written. A process
    that cannot write its part makes the others wait for that part. In the end it raises a timeout
    itself, with its own error as the cause."""
    mistake: BaseException | None = error
    while mistake is not None and (
        isinstance(mistake, TimeoutError) or "DEADLINE_EXCEEDED" in str(mistake)
    ):
        mistake = mistake.__cause__ or mistake.__context__
    if mistake is None:
        return True, f"it took longer than {WRITE_S} s"
    us = process_group()
    message = first_line(mistake)
    return False, message if us.is_alone else f"{us}: {message}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message. If the line has 160 characters or more, returns
    the system's reason that it names, or the last 120, because Orbax's messages end with the
    cause."""
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text if len(text) < 160 else f"… {text[-120:]}"


def silence() -> None:
    """Silences Orbax and its event loop. They log a hundred lines for a checkpoint at INFO, and
    hundreds for a failed save, which pat_jax reports in one."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if getattr(sys.unraisablehook, "func", None) is not _print_but_strays:
        sys.unraisablehook = partial(_print_but_strays, sys.unraisablehook)


def _print_but_strays(print_error: Callable[[Any], Any], raised: Any) -> None:
    """Prints an error that nobody can handle, except for those of TensorStore's threads: after a
    failed save, each array that was still being written finds its event loop closed."""
    if raised.exc_type is not RuntimeError or str(raised.exc_value) != "Event loop is closed":
        print_error(raised)


def read_part(path: Path, abstract: Any) -> Any:
    """Reads the part of a complete checkpoint's state that has the structure of `abstract`, padding
    included. Raises UserError if it cannot be read."""
    silence()
    args = ocp.checkpoint_utils.construct_restore_args(abstract, strict=False)
    wanted = ocp.args.PyTreeRestore(abstract, restore_args=args, partial_restore=True)
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            found = reader.restore(path, args=ocp.args.Composite(state=wanted))["state"]
        # Orbax leaves the shape where the checkpoint has nothing.
        for name, leaf in jax.tree_util.tree_leaves_with_path(found):
            if not isinstance(leaf, jax.Array):
                raise ValueError(f"it has no {jax.tree_util.keystr(name)}")
        return found
    except Exception as error:  # what Orbax raises has no common class
        log.info("%s cannot be read", path, exc_info=error)
        raise UserError(
            f"the checkpoint {path} cannot be read ({first_line(error)}): expected a whole one, of a run "
            "with these options; choose another."
        ) from error


_Handler = ocp.type_handlers.ArrayHandler


class _OwnedArrays(_Handler):
    """Holds arrays that only some processes have. In Orbax each process has a shard of each array,
    and process 0 writes all metadata. Here the owners of an array write it, and the first of them
    writes its metadata."""

    def memory_size(self, values: Sequence[jax.Array]) -> Sequence[tuple[int, int]]:
        # Only early versions of Orbax 0.12 have and ask for this.
        of_orbax: Any = super()
        are_here = [not is_absent(x.sharding.device_set) for x in values]
        pairs = zip(values, are_here, strict=True)
        sizes = iter(of_orbax.memory_size([x for x, is_here in pairs if is_here]))
        return [next(sizes) if is_here else (0, 0) for is_here in are_here]

    async def serialize(
        self, values: Sequence[jax.Array], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        alike: dict[int, list[tuple[jax.Array, Any, Any]]] = {}  # by the first owner
        for one in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            devices = one[0].sharding.device_set
            if not is_absent(devices):
                alike.setdefault(owners(devices)[0], []).append(one)
        written: list[Any] = []
        for first, some in alike.items():
            handler = _Handler(primary_host=first, enable_write_sharding_file=False)
            written += await handler.serialize(*map(list, zip(*some, strict=True)))
        return written

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[jax.Array]:
        assert args is not None, "who restores gives shapes with shardings"
        found: dict[int, jax.Array] = {}
        here = []
        for i, asked in enumerate(args):
            if is_absent(asked.sharding.device_set):
                how = {"dtype": asked.dtype, "sharding": asked.sharding}
                found[i] = without_shards(jax.ShapeDtypeStruct(asked.global_shape, **how))
            else:
                here.append(i)
        if here:
            read = await super().deserialize([infos[i] for i in here], [args[i] for i in here])
            found |= dict(zip(here, read, strict=True))
        return [found[i] for i in range(len(args))]


def register_owned_arrays() -> None:
    """From now on Orbax writes and reads arrays that some processes own alone."""
    silence()  # it warns of what is replaced
    handler = _OwnedArrays(enable_write_sharding_file=False)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
