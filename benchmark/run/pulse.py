"""Signs of life of the processes of one run, and what one of them says before it ends."""

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import Store

#: Seconds between two signs of life.
BEAT = 0.5
#: Seconds without one after which a rank counts as gone, once a connection has broken.
BROKEN = 5.0


class OtherRankError(Exception):
    """Another rank has ended, and so this one does.

    Args:
        message: one line: which, and why.
        code: exit status.
        told_here: whether this rank is the one to say so.
    """

    def __init__(self, message: str, code: int, told_here: bool) -> None:
        super().__init__(message, code, told_here)
        self.message = message
        self.code = code
        self.told_here = told_here

    def __str__(self) -> str:
        """The line."""
        return self.message


class Pulse(threading.Thread):
    """Tells the other ranks that this one lives, and notices when one of them does not.

    Args:
        store: of all ranks; for this thread alone.
        rank: this one.
        count: of ranks.
        timeout: seconds without a sign of life after which a rank counts as gone.
    """

    def __init__(self, store: Store, rank: int, count: int, timeout: float) -> None:
        super().__init__(daemon=True, name="pulse")
        self.rank = rank
        self.count = count
        self.timeout = timeout
        #: set where a connection to another rank has broken
        self.broken = threading.Event()
        #: what there is to raise
        self.trouble: OtherRankError | None = None
        self._store = store
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._beats = 0
        self._seen = [(b"", time.monotonic())] * count
        self._beat()

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"pulse/{self.rank}", str(self._beats))

    def run(self) -> None:
        """Beat and listen until stopped."""
        while self.trouble is None and not self._stopped.wait(BEAT):
            try:
                with self._lock:
                    self._beat()
                    said = self._store.get("ended") if self._store.check(["ended"]) else None
                    beats = self._store.multi_get([f"pulse/{rank}" for rank in range(self.count)])
            except RuntimeError:  # the store ends with the rank that has it
                self.trouble = self._gone([0])
                return
            now = time.monotonic()
            self._seen = [
                before if beat == before[0] else (beat, now) for beat, before in zip(beats, self._seen, strict=True)
            ]
            patience = min(BROKEN, self.timeout) if self.broken.is_set() else self.timeout
            silent = [rank for rank, (_, seen) in enumerate(self._seen) if now - seen > patience and rank != self.rank]
            if said is not None:
                self.trouble = self._told(json.loads(said))
            elif silent:
                self.trouble = self._gone(silent)

    def stop(self) -> None:
        """Say nothing any more."""
        self._stopped.set()

    def tell(self, message: str, code: int) -> None:
        """Let the others know why this rank ends, if nobody has told them anything."""
        said = json.dumps({"rank": self.rank, "message": message, "code": code})
        try:
            with self._lock:
                self._store.compare_set("ended", "", said)
        except RuntimeError:  # there is nobody to tell
            return

    def _told(self, said: dict[str, Any]) -> OtherRankError:
        return OtherRankError(said["message"], said["code"], told_here=self.rank == 0)

    def _gone(self, silent: Sequence[int]) -> OtherRankError:
        living = [rank for rank in range(self.count) if rank not in silent]
        which = f"rank {silent[0]} has" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))} have"
        message = f"{which} ended without a word (killed, out of memory, or a machine that is gone)"
        return OtherRankError(message, 1, told_here=self.rank == min(living))
