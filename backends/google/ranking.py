"""Ranking API of Google (Discovery Engine): request body and reply. Pure."""

import msgspec

from backends.contract import Rerank
from backends.contract.errors import InvalidWork, ReplicaFailed
from backends.hosted.models import HostedModel, HostedRoute, Request, Rows, every_place
from backends.http.answers import decode_json
from backends.http.client import UpstreamResponse
from backends.http.replies import order_scores

RANKING_PATH = "/v1/projects/{project}/locations/global/rankingConfigs/default_ranking_config:rank"


class Record(msgspec.Struct, frozen=True):
    """Score of one document, under the id that the request gave it."""

    id: str
    score: float


class Ranking(msgspec.Struct, frozen=True):
    """Body of a reply."""

    records: list[Record]


def _encode(work: Rerank, model: HostedModel) -> list[Request]:
    for index, text in enumerate(work.documents):
        if not text:
            raise InvalidWork("this upstream takes no empty document", empty=True, input_index=index)
    records = [{"id": str(i), "content": text} for i, text in enumerate(work.documents)]
    # Without the details of records some of its models return no scores.
    body = {"model": model.name, "query": work.query, "records": records, "topN": len(records)}
    return [Request(model.path, body, every_place(work))]


def _decode(response: UpstreamResponse, expected: int) -> Rows:
    records = decode_json(response.body, Ranking).records
    if any(not record.id.isdecimal() for record in records):
        raise ReplicaFailed("the upstream's ids are not those of the documents")
    return Rows(order_scores([(int(record.id), record.score) for record in records], expected, "records"))


RANK = HostedRoute(_encode, _decode)
