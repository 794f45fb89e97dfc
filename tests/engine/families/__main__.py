"""Command that writes docs/models-tested.md from the table of families."""

from tests.engine.families.page import PAGE, models_page

if __name__ == "__main__":
    PAGE.write_text(models_page(), encoding="utf-8")
    print(f"wrote {PAGE}")  # noqa: T201 - the result of a command
