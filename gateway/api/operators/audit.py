"""/admin/audit: the records of what operators have changed."""

from typing import Annotated, Any

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter

from gateway.api.operators.access import OPERATORS, store_errors
from gateway.api.operators.admin import Admin
from gateway.api.operators.pages import check_limit, moment_of
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.audit.query import PAGE_MAX, AuditQuery, InvalidCursor
from gateway.audit.records import AuditRecord, time_text
from gateway.audit.trail import AuditTrail, NoTrail
from gateway.errors import InvalidInput, NotFound
from gateway.tenants.audited import restoring_patch

FAILURES = document_errors(TEI)


class ListedRecord(AuditRecord, frozen=True):
    """A record, and what undoes it.

    restore: of a changed or removed tenant, the body of `PATCH` or `PUT /admin/tenants/{name}` with which the
    named settings are again what they were; null for all other records, and if a value was cut.
    """

    restore: dict[str, Any] | None = None


class ListedRecords(msgspec.Struct, frozen=True):
    """Records, newest first. next: cursor of the next page, null after the last one."""

    data: list[ListedRecord]
    next: str | None = None


@get("/admin/audit", responses=FAILURES, tags=["Operators"], opt=OPERATORS)
async def list_records(
    audit: NamedDependency[AuditTrail],
    admin: NamedDependency[Admin],
    object_: Annotated[str, QueryParameter(name="object")] = "",
    since: FromQuery[str] = "",
    until: FromQuery[str] = "",
    actor: FromQuery[str] = "",
    action: FromQuery[str] = "",
    search: FromQuery[str] = "",
    limit: FromQuery[int] = 100,
    cursor: FromQuery[str] = "",
) -> ListedRecords:
    """List what operators have changed, the newest first.

    `object` is one such as `tenant/acme`, or a kind such as `tenant`. `since` and `until` are days, moments
    or durations ago, such as `12h`. `action` is one such as `change`. `search` is a part of any field,
    without case. `next` of a page is the `cursor` of the one after it.
    """
    query = AuditQuery(
        _time("since", since),
        _time("until", until),
        object_,
        actor,
        check_limit(limit, PAGE_MAX, PAGE_MAX),
        cursor,
        action,
        search.strip(),
    )
    try:
        with store_errors():
            await admin.settle_records()
            page = await audit.page(query)
    except InvalidCursor as error:
        raise InvalidInput(str(error), param="cursor") from error
    except NoTrail as error:
        raise NotFound(str(error)) from error
    return ListedRecords([_listed(record) for record in page.data], page.next)


def _listed(record: AuditRecord) -> ListedRecord:
    return ListedRecord(**msgspec.structs.asdict(record), restore=restoring_patch(record))


def _time(name: str, text: str) -> str:
    """Return a time as records have it, empty for none. Raises: InvalidInput."""
    moment = moment_of(name, text)
    return "" if moment is None else time_text(moment)


HANDLERS = [list_records]
