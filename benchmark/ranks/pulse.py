"""Signs of life of the processes of one run, and what one of them says before it ends."""

import json
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import Store

from benchmark.errors import printable

#: Seconds between two signs of life.
BEAT = 0.5
#: Seconds without one after which a rank counts as gone, once a connection has broken.
BROKEN = 5.0
#: Most characters of what another rank says before it ends.
LONGEST = 2000


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
        is_left: whether the process that started this one has ended, which is the first rank.
    """

    def __init__(
        self, store: Store, rank: int, count: int, timeout: float, is_left: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(daemon=True, name="pulse")
        self.rank = rank
        self.count = count
        self.timeout = timeout
        #: set where a connection to another rank has broken
        self.broken = threading.Event()
        #: what there is to raise
        self.trouble: OtherRankError | None = None
        self._store = store
        self._is_left = is_left
        self._stopped = threading.Event()
        #: what this rank says before it ends, and whether it has been said or can't be
        self._words: str | None = None
        self._spoken = threading.Event()
        self._beats = 0
        self._turned = time.monotonic()
        self._seen = [(b"", self._turned)] * count
        #: of the other thread: when it has looked, the turn that it saw, and since when it has seen the same
        self._looked = self._same_since = self._turned
        self._seen_turn = self._turned
        self._beat()

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"pulse/{self.rank}", str(self._beats))

    def run(self) -> None:
        """Beat, speak and listen until stopped."""
        while self.trouble is None and not self._stopped.wait(BEAT):
            try:
                self._beat()
                if self._words is not None and not self._spoken.is_set():
                    self._store.compare_set("ended", "", self._words)
                    self._spoken.set()
                said = self._store.get("ended") if self._store.check(["ended"]) else None
                beats = self._store.multi_get([f"pulse/{rank}" for rank in range(self.count)])
            except RuntimeError:  # the store ends with the rank that has it
                self.trouble = self._gone([0])
                break
            now = time.monotonic()
            if now - self._turned > BROKEN:  # this process was stopped; so were the others perhaps
                self._seen = [(beat, now) for beat, _ in self._seen]
            self._turned = now
            self._seen = [
                before if beat == before[0] else (beat, now) for beat, before in zip(beats, self._seen, strict=True)
            ]
            patience = min(BROKEN, self.timeout) if self.broken.is_set() else self.timeout
            silent = [rank for rank, (_, seen) in enumerate(self._seen) if now - seen > patience and rank != self.rank]
            if said is not None:
                self.trouble = self._told(said)
            elif self._is_left():
                self.trouble = self._gone([0])
            elif silent:
                self.trouble = self._gone(silent)
        self._spoken.set()

    def look(self) -> None:
        """Raise what there is to know of the other ranks, also where their store has stopped to answer.

        Raises:
            OtherRankError: one has ended.
        """
        now = time.monotonic()
        if self._turned != self._seen_turn or now - self._looked > BROKEN:  # whoever was stopped has missed turns
            self._seen_turn, self._same_since = self._turned, now
        self._looked = now
        if self.trouble is None and self.is_alive() and now - self._same_since > self.timeout:
            said = f"the other ranks have not answered for {self.timeout:g} s (frozen, or a machine that is gone)"
            self.trouble = OtherRankError(said, 1, told_here=self.rank <= 1)
        if self.trouble is not None:
            raise self.trouble

    def stop(self) -> None:
        """Say nothing any more."""
        self._stopped.set()

    def tell(self, message: str, code: int) -> None:
        """Let the others know why this rank ends, if nobody has told them anything."""
        self._words = json.dumps({"rank": self.rank, "message": message, "code": code})
        self._spoken.wait(BROKEN)  # not for ever: the store may be that of a rank that is frozen

    def _told(self, said: bytes) -> OtherRankError:
        """Make one line and an exit status that is none of success of what another rank has said."""
        try:
            told = json.loads(said)
            message, code = str(told["message"]), int(told["code"])
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            message, code = "another rank has ended, and what it said can't be read", 1
        line = printable(" ".join(message[:LONGEST].split()))
        return OtherRankError(line, code if 1 <= code <= 255 else 1, told_here=self.rank == 0)

    def _gone(self, silent: Sequence[int]) -> OtherRankError:
        living = [rank for rank in range(self.count) if rank not in silent]
        which = f"rank {silent[0]} has" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))} have"
        message = f"{which} ended without a word (killed, frozen, out of memory, or a machine that is gone)"
        return OtherRankError(message, 1, told_here=self.rank == min(living))
