"""Records, questions and answers of gateways that share a Redis.

All keys have one hash tag. A record expires by itself. A question is a short text that every gateway reads
with its next renewal; each answer is a field of a hash that the questioner removes, and that expires
otherwise. Nothing is written per call.
"""

from collections.abc import Mapping, Sequence

import msgspec

from gateway.fleet.members import Member, SeenMember
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

PREFIX = "gw:{fleet}:"
MEMBERS = f"{PREFIX}members"
QUESTIONS = f"{PREFIX}questions"
# A gateway that was killed is shown as silent until its record expires.
KEPT_S = 60
# Members that a report lists.
MEMBERS_MAX = 2048
MEMBERS_PER_READ = 256
# Open questions of all gateways, each of which may take `ANSWERS_BYTES_MAX` in Redis.
QUESTIONS_MAX = 4
# Those of tenants among them, one of each: some are left for operators.
TENANTS_QUESTIONS_MAX = 3
ANSWERS_BYTES_MAX = 4 * 1024 * 1024
QUESTION_S = 10
ANSWER_KEPT_S = 30

BEAT = load_script("beat", package="gateway.fleet")
ASK = load_script("ask", package="gateway.fleet")
LIST = load_script("members", package="gateway.fleet")


class CallFilter(msgspec.Struct, frozen=True):
    """Selection of recent calls: of one tenant, key (id) or model, and only those that failed.

    since_s: of their end, in seconds since 1970. request_id: a part of it, empty for any.
    """

    tenant: str | None = None
    key: str | None = None
    model: str | None = None
    failed: bool = False
    since_s: float = 0.0
    request_id: str = ""


class Question(msgspec.Struct, frozen=True):
    """Question for the recent calls of all gateways. by: the gateway that asks. bytes_max: of each answer.

    asker: the tenant that asks, empty for an operator.
    """

    id: str
    by: str
    filter: CallFilter
    bytes_max: int
    asker: str = ""


class FleetStore:
    """The fleet in Redis. All operations raise StoreUnavailable."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def beat(self, member: Member) -> list[Question]:
        """Renew the record of a member, and return the open questions."""
        id_ = member.gateway.id
        argument = {"id": id_, "record": msgspec.json.encode(member).decode(), "kept": KEPT_S}
        reply = await self._client.run_script(
            BEAT, (MEMBERS, _record(id_), QUESTIONS), msgspec.msgpack.encode(argument)
        )
        return [question for text in _texts(reply) if (question := _question(text)) is not None]

    async def leave(self, id_: str) -> None:
        """Remove a member that stops."""
        await self._client.execute("ZREM", MEMBERS, id_)
        await self._client.execute("DEL", _record(id_))

    async def members(self) -> list[SeenMember]:
        """Return the members, without those whose record another release has written in another form."""
        reply = await self._client.run_script(LIST, (MEMBERS,), msgspec.msgpack.encode({"most": MEMBERS_MAX}))
        ages: Mapping[str, float] = dict(msgspec.msgpack.decode(reply, type=list[tuple[str, float]]))
        ids, found = list(ages), []
        for start in range(0, len(ids), MEMBERS_PER_READ):
            part = ids[start : start + MEMBERS_PER_READ]
            records: Sequence[bytes | None] = await self._client.execute("MGET", *map(_record, part))
            found += [
                SeenMember(member, ages[id_])
                for id_, record in zip(part, records, strict=True)
                if record is not None and (member := _member(record)) is not None
            ]
        return found

    async def ask(self, question: Question) -> bool:
        """Ask all gateways; return False if as many questions as allowed are open, of a tenant one."""
        argument = {
            "question": msgspec.json.encode(question).decode(),
            "seconds": QUESTION_S,
            "most": QUESTIONS_MAX,
            "asker": question.asker,
            "most_of_tenants": TENANTS_QUESTIONS_MAX,
        }
        added = await self._client.run_script(ASK, (QUESTIONS,), msgspec.msgpack.encode(argument))
        return msgspec.msgpack.decode(added, type=bool)

    async def answer(self, question: Question, id_: str, content: bytes) -> None:
        """Store the answer of one gateway."""
        key = _answers(question)
        await self._client.execute("HSET", key, id_, content)
        await self._client.execute("EXPIRE", key, ANSWER_KEPT_S)

    async def count_answers(self, question: Question) -> int:
        """Return how many gateways have answered."""
        return int(await self._client.execute("HLEN", _answers(question)))

    async def take_answers(self, question: Question) -> Mapping[str, bytes]:
        """Return the answers by gateway, and remove them with the question."""
        answers: Mapping[bytes, bytes] = await self._client.execute("HGETALL", _answers(question))
        await self._client.execute("ZREM", QUESTIONS, msgspec.json.encode(question))
        await self._client.execute("DEL", _answers(question))
        return {id_.decode(errors="replace"): content for id_, content in answers.items()}


def _record(id_: str) -> str:
    return f"{PREFIX}member:{id_}"


def _answers(question: Question) -> str:
    return f"{PREFIX}answers:{question.id}"


def _texts(reply: bytes) -> list[str]:
    try:
        return msgspec.msgpack.decode(reply, type=list[str])
    except msgspec.MsgspecError as error:
        raise StoreUnavailable("the fleet's questions cannot be read") from error


def _question(text: str) -> Question | None:
    """Return a question; None for one of another release, which is not answered."""
    try:
        return msgspec.json.decode(text, type=Question)
    except msgspec.MsgspecError:
        return None


def _member(record: bytes) -> Member | None:
    try:
        return msgspec.json.decode(record, type=Member)
    except msgspec.MsgspecError:
        return None
