"""The messages of TEI's gRPC services: generated from the `.proto` files, and as TEI's clients write them."""

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from backends.tei_protos import tei_multiplexer_pb2, tei_pb2

FOLDER = Path(tei_pb2.__file__).parent
MODULES = {"tei": tei_pb2, "tei_multiplexer": tei_multiplexer_pb2}


def declared(name: str) -> dict[str, dict[str, int]]:
    """Return message → field → number, read from the text of a `.proto` file."""
    text = (FOLDER / f"{name}.proto").read_text()
    messages = re.findall(r"^message (\w+) \{(.*?)\}$", text, re.MULTILINE | re.DOTALL)
    return {
        message: {field: int(number) for field, number in re.findall(r"(\w+) = (\d+);", body)}
        for message, body in messages
    }


@pytest.mark.parametrize("name", MODULES)
def test_generated_code_has_the_fields_of_its_file(name: str) -> None:
    descriptor: FileDescriptor = MODULES[name].DESCRIPTOR
    generated = {
        message.name: {field.name: field.number for field in message.fields}
        for message in descriptor.message_types_by_name.values()
    }

    assert declared(name) == generated
    assert len(generated) >= 10


@pytest.mark.parametrize("name", MODULES)
def test_generated_code_has_the_methods_of_its_file(name: str) -> None:
    text = (FOLDER / f"{name}.proto").read_text()
    services = MODULES[name].DESCRIPTOR.services_by_name.values()

    assert re.findall(r"^  rpc (\w+)\(", text, re.MULTILINE) == [
        method.name for service in services for method in service.methods
    ]


def test_reads_what_a_client_of_tei_writes() -> None:
    # Field 1 "hi", field 3 (normalize) false, field 4 (truncation_direction) left, field 6 (dimensions) 300.
    sent = b"\x0a\x02hi\x18\x00\x20\x01\x30\xac\x02"

    request = tei_pb2.EmbedRequest.FromString(sent)

    assert (request.inputs, request.normalize, request.dimensions) == ("hi", False, 300)
    assert request.HasField("normalize")
    assert request.truncation_direction == tei_pb2.TRUNCATION_DIRECTION_LEFT
    assert not tei_pb2.EmbedRequest(inputs="hi").HasField("normalize")
