"""Fake TEI as a command: `python -m tests.fakes.tei_server --model-id NAME --port PORT`."""

import argparse
import sys

import uvicorn

from tests.fakes.tei import FakeTei


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-id", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    sys.stderr.write(f"serving {options.model_id}\n")
    uvicorn.run(FakeTei(), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
