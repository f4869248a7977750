"""What this node gave to each peer and got from it, over all runs in a swarm.

Owns: the sums by peer and by day, kept in SQLite; what they say of a peer's use.
Does not know: when a group is accepted or trained on; it is told.

Sums are collected in memory and written every few seconds and at the end, so a crash loses the
last seconds. A peer's own words ("I accepted so many of yours") are kept apart from what this node
saw itself.
"""

import logging
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from swarm.errors import DataError, SwarmError

log = logging.getLogger(__name__)

SCHEMA = "swarm-node/ledger/1"

FLUSH_S = 5.0

MAX_PEERS = 4096
"""Rows kept; identities are free, so those that never gave a usable group go first."""

MAX_DAYS = 400

_FORMAT = 1

PEER_SUMS = (
    "groups_fetched",
    "groups_accepted",
    "groups_rejected",
    "tokens_got",
    "bytes_got",
    "blobs_given",
    "bytes_given",
    "samples",
    "samples_trained",
    "rewards",
    "reward_sum",
)
DAY_SUMS = (
    "groups_made",
    "tokens_made",
    "bytes_made",
    "groups_accepted",
    "tokens_got",
    "bytes_got",
    "bytes_given",
    "samples_trained",
    "steps",
)
_REPORTED = ("accepted_of_mine", "trained_of_mine")

_KL_LOWEST = 1e-4
_KL_PER_DECADE = 6
_KL_BINS = 8 * _KL_PER_DECADE
"""From 1e-4 to 1e4 nats, each bin 1.47 times as high as the one before it."""

_TABLES = f"""
CREATE TABLE IF NOT EXISTS peers (
    peer_id TEXT PRIMARY KEY, first_s REAL NOT NULL, last_s REAL NOT NULL,
    {", ".join(f"{name} REAL NOT NULL DEFAULT 0" for name in (*PEER_SUMS, *_REPORTED))}
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counts (
    peer_id TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (peer_id, kind, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS days (
    day TEXT PRIMARY KEY, {", ".join(f"{name} REAL NOT NULL DEFAULT 0" for name in DAY_SUMS)}
) WITHOUT ROWID;
PRAGMA user_version = {_FORMAT};
"""
# "counts" has rejections by reason (kind "rejected") and samples by divergence (kind "kl").


class Ledger:
    """Collects and stores the sums.

    Args:
        path: the SQLite file; made where it is missing, put aside where it is damaged.
        clock: Unix time.

    Attributes:
        trouble: why the last write failed; empty when it did not.

    Raises:
        SwarmError: another process has it locked, the disk is full or fails.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._sums: dict[str, Counter[str]] = {}
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._reports: dict[str, tuple[int, int]] = {}
        self._days: dict[str, Counter[str]] = {}
        self._flushed_s = clock()
        self.trouble = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = self._open()
        except sqlite3.OperationalError as error:  # in use, or no room: the file may be sound
            raise SwarmError(f"{path}: the ledger cannot be opened now: {error}") from None
        except sqlite3.DatabaseError as error:
            aside = path.with_name(path.name + ".damaged")
            log.error("%s: %s; put aside as %s", path, error, aside.name)
            path.replace(aside)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._db = self._open()

    # -- what happens ----------------------------------------------------------------------------

    def made(self, groups: int, tokens: int, size_bytes: int) -> None:
        """This node sampled and published groups."""
        self._add_day(groups_made=groups, tokens_made=tokens, bytes_made=size_bytes)

    def fetched(self, peer_id: str, size_bytes: int) -> None:
        """A group came from a peer, whatever it holds."""
        self._add(peer_id, groups_fetched=1, bytes_got=size_bytes)
        self._add_day(bytes_got=size_bytes)

    def accepted(self, peer_id: str, tokens: int) -> None:
        """A peer's group passed all checks and waits to be trained on."""
        self._add(peer_id, groups_accepted=1, tokens_got=tokens)
        self._add_day(groups_accepted=1, tokens_got=tokens)

    def rejected(self, peer_id: str, reason: str) -> None:
        """A peer's group was refused."""
        self._add(peer_id, groups_rejected=1)
        self._counts[peer_id, "rejected", reason] += 1

    def given(self, peer_id: str, size_bytes: int) -> None:
        """A peer took a group, or a prompt set, from this node."""
        self._add(peer_id, blobs_given=1, bytes_given=size_bytes)
        self._add_day(bytes_given=size_bytes)

    def trained(
        self,
        peer_id: str,
        *,
        samples: int,
        samples_trained: int,
        rewards: Sequence[float],
        divergences: Sequence[float],
    ) -> None:
        """A step used a peer's samples, or this node's own.

        Args:
            peer_id: who sampled them.
            samples: in the batch.
            samples_trained: of them, in the loss.
            rewards: of the samples, as computed here.
            divergences: from this node's policy, nats, of the samples for which it is known.
        """
        self._add(
            peer_id,
            samples=samples,
            samples_trained=samples_trained,
            rewards=len(rewards),
            reward_sum=math.fsum(rewards),
        )
        for value in divergences:
            self._counts[peer_id, "kl", str(_kl_bin(value))] += 1
        self._add_day(samples_trained=samples_trained)

    def stepped(self) -> None:
        """A step was made."""
        self._add_day(steps=1)

    def reported(self, peer_id: str, accepted: int, trained: int) -> None:
        """A peer says how much it accepted of this node's groups and trained of its samples."""
        self._reports[peer_id] = (accepted, trained)
        self._sums.setdefault(peer_id, Counter())
        self._flush_when_due()

    # -- storage ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what was collected; a failure keeps it for the next time."""
        self._flushed_s = now = self._clock()
        try:
            with self._db:
                self._write(now)
        except sqlite3.Error as error:
            if not self.trouble:
                log.warning("%s: not written: %s", self._path, error)
            self.trouble = f"{self._path}: {error}"
            return
        self.trouble = ""
        self._sums.clear()
        self._counts.clear()
        self._reports.clear()
        self._days.clear()

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        self._db.close()

    def view(self, me: str, peers: int) -> dict[str, Any]:
        """As `read_ledger`, up to now, but with the first peers only and without the days."""
        self.flush()
        view = _view(self._db, me)
        del view["days"]
        return view | {"peers": view["peers"][:peers]}

    def trades(self, limit: int) -> list[tuple[str, int, int]]:
        """Of the peers that gave most: (peer, groups accepted, samples trained)."""
        self.flush()
        rows = self._db.execute(
            "SELECT peer_id, groups_accepted, samples_trained FROM peers "
            "WHERE groups_accepted > 0 ORDER BY last_s DESC LIMIT ?",
            (limit,),
        )
        return [(peer_id, int(accepted), int(trained)) for peer_id, accepted, trained in rows]

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=1.0)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            found = db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, _FORMAT):
                raise sqlite3.DatabaseError(f"format {found}; this version writes {_FORMAT}")
            db.executescript(_TABLES)
        except sqlite3.DatabaseError:
            db.close()
            raise
        return db

    def _write(self, now: float) -> None:
        for peer_id, sums in self._sums.items():
            self._db.execute(
                "INSERT INTO peers (peer_id, first_s, last_s) VALUES (?, ?, ?) "
                "ON CONFLICT (peer_id) DO UPDATE SET last_s = excluded.last_s",
                (peer_id, now, now),
            )
            for name, value in sums.items():
                self._db.execute(
                    f"UPDATE peers SET {name} = {name} + ? WHERE peer_id = ?", (value, peer_id)
                )
        for peer_id, report in self._reports.items():
            self._db.execute(
                "UPDATE peers SET accepted_of_mine = ?, trained_of_mine = ? WHERE peer_id = ?",
                (*report, peer_id),
            )
        self._db.executemany(
            "INSERT INTO counts VALUES (?, ?, ?, ?) "
            "ON CONFLICT (peer_id, kind, key) DO UPDATE SET count = count + excluded.count",
            [(*key, count) for key, count in self._counts.items()],
        )
        for day, sums in self._days.items():
            self._db.execute("INSERT OR IGNORE INTO days (day) VALUES (?)", (day,))
            for name, value in sums.items():
                self._db.execute(f"UPDATE days SET {name} = {name} + ? WHERE day = ?", (value, day))
        self._forget()

    def _forget(self) -> None:
        (peers,) = self._db.execute("SELECT count(*) FROM peers").fetchone()
        if peers > MAX_PEERS:
            self._db.execute(
                "DELETE FROM peers WHERE peer_id IN (SELECT peer_id FROM peers "
                "ORDER BY samples_trained > 0, groups_accepted > 0, last_s LIMIT ?)",
                (peers - MAX_PEERS,),
            )
            self._db.execute("DELETE FROM counts WHERE peer_id NOT IN (SELECT peer_id FROM peers)")
        self._db.execute(
            "DELETE FROM days WHERE day NOT IN (SELECT day FROM days ORDER BY day DESC LIMIT ?)",
            (MAX_DAYS,),
        )

    def _add(self, peer_id: str, **sums: float) -> None:
        self._sums.setdefault(peer_id, Counter()).update(sums)
        self._flush_when_due()

    def _add_day(self, **sums: float) -> None:
        day = time.strftime("%Y-%m-%d", time.gmtime(self._clock()))
        self._days.setdefault(day, Counter()).update(sums)
        self._flush_when_due()

    def _flush_when_due(self) -> None:
        if abs(self._clock() - self._flushed_s) >= FLUSH_S:
            self.flush()


def read_ledger(path: Path, me: str) -> dict[str, Any]:
    """What the ledger holds, also while its node runs.

    Args:
        path: its file.
        me: this node's peer id; its own samples are told apart from its peers'.

    Returns:
        {"schema", "gave", "got", "days", "own", "peers"}: sums over all time, sums by day, and a
        row for this node and for each peer, the most useful first.

    Raises:
        DataError: there is none yet, or it is damaged.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist yet; a node writes it once it trades")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            return _view(db, me)
    except sqlite3.Error as error:
        raise DataError(f"{path}: not a ledger that can be read: {error}") from None


def _view(db: sqlite3.Connection, me: str) -> dict[str, Any]:
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for peer_id, kind, key, count in db.execute("SELECT * FROM counts"):
        counts.setdefault((peer_id, kind), {})[key] = count
    names = ("peer_id", "first_s", "last_s", *PEER_SUMS, *_REPORTED)
    raw = [
        dict(zip(names, row, strict=True))
        for row in db.execute(f"SELECT {', '.join(names)} FROM peers")
    ]
    updates = sum(row["samples_trained"] for row in raw)
    rows = [_row(row, counts, updates) for row in raw]
    rows.sort(key=lambda row: (-row["samples_trained"], -row["groups_accepted"], row["peer_id"]))
    peers = [row for row in rows if row["peer_id"] != me]
    own = [row for row in rows if row["peer_id"] == me]
    days = [
        {"day": day, **{k: _plain(v) for k, v in zip(DAY_SUMS, sums, strict=True)}}
        for day, *sums in db.execute(f"SELECT day, {', '.join(DAY_SUMS)} FROM days ORDER BY day")
    ]

    def total(name: str, table: Sequence[Mapping[str, Any]]) -> Any:
        return _plain(math.fsum(row[name] for row in table))

    return {
        "schema": SCHEMA,
        "gave": {
            "groups_made": total("groups_made", days),
            "tokens_made": total("tokens_made", days),
            "bytes_made": total("bytes_made", days),
            "blobs_sent": total("blobs_given", peers),
            "bytes_sent": total("bytes_given", peers),
            "groups_accepted_by_peers": total("accepted_of_mine", peers),
            "samples_trained_by_peers": total("trained_of_mine", peers),
            "peers_that_accepted": sum(row["accepted_of_mine"] > 0 for row in peers),
        },
        "got": {
            "groups_fetched": total("groups_fetched", peers),
            "groups_accepted": total("groups_accepted", peers),
            "groups_rejected": total("groups_rejected", peers),
            "tokens": total("tokens_got", peers),
            "bytes": total("bytes_got", peers),
            "samples_trained": total("samples_trained", peers),
            "update_share": round(1 - own[0]["update_share"], 4) if own and updates else None,
        },
        "days": days,
        "own": own[0] if own else None,
        "peers": peers,
    }


def _row(
    raw: Mapping[str, Any], counts: Mapping[tuple[str, str], Mapping[str, int]], updates: float
) -> dict[str, Any]:
    peer_id = raw["peer_id"]
    bins = {int(key): count for key, count in counts.get((peer_id, "kl"), {}).items()}
    judged = raw["groups_accepted"] + raw["groups_rejected"]
    row = {key: _plain(value) for key, value in raw.items() if key not in ("rewards", "reward_sum")}
    return row | {
        "accept_rate": round(raw["groups_accepted"] / judged, 4) if judged else None,
        "rejected_by_reason": dict(counts.get((peer_id, "rejected"), {})),
        "mean_reward": round(raw["reward_sum"] / raw["rewards"], 4) if raw["rewards"] else None,
        "trained_rate": round(raw["samples_trained"] / raw["samples"], 4)
        if raw["samples"]
        else None,
        "update_share": round(raw["samples_trained"] / updates, 4) if updates else None,
        **{f"kl_p{percent}": _quantile(bins, percent / 100) for percent in (50, 90, 99)},
    }


def _kl_bin(value: float) -> int:
    """The bin of a divergence; -1: below the lowest one, or negative; the last: anything above."""
    if not value > _KL_LOWEST:
        return -1
    return min(int(math.log10(min(value, 1e300) / _KL_LOWEST) * _KL_PER_DECADE), _KL_BINS)


def _quantile(bins: Mapping[int, int], q: float) -> float | None:
    """From counts by bin: the middle of the bin in which the quantile lies, nats."""
    wanted = q * sum(bins.values())
    for index in sorted(bins):
        wanted -= bins[index]
        if wanted <= 0:
            if index < 0:
                return 0.0
            return float(f"{_KL_LOWEST * 10 ** ((index + 0.5) / _KL_PER_DECADE):.3g}")
    return None


def _plain(value: Any) -> Any:
    """Sums are stored as REAL; whole ones are shown as such."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
