"""What `make docs` adds to the pages in docs/: the files they link to, and the reference of the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ADDED = (
    *("CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE"),
    *("benchmarks/paper/paper.json", "examples/**/*", "results/**/*.json"),
)
LINK = re.compile(r"(\]\()(?![a-z]+:)([^)\s#]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's files that pages link to, so that strict mode checks those links too."""
    from mkdocs.structure.files import File

    for pattern in ADDED:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and not path.name.startswith(".") and "node_modules" not in path.parts:
                name = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "command-line.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as they are in the repository, where docs/ is a folder, become links of the site, where it is the root."""
    here = Path(page.file.abs_src_path or ROOT / "docs" / "x").parent

    def moved(found: re.Match[str]) -> str:
        target = (here / found[2]).resolve()
        if target == ROOT / "README.md":
            target = ROOT / "docs" / "README.md"
        inside = target.relative_to(ROOT / "docs") if target.is_relative_to(ROOT / "docs") else target.relative_to(ROOT)
        depth = len(Path(page.file.src_uri).parts) - 1
        return found[1] + "../" * depth + inside.as_posix()

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Pages of results are wide and have compact tables; `stylesheets/site.css` knows them by these classes."""
    name = page.file.src_uri.removesuffix(".md")
    if name.split("/")[0] != "results":
        return html
    page.meta["hide"] = ["toc"]
    kind = "screen" if name == "results" else "lines" if "/table-" in name or name.endswith("/photos") else "words"
    return f'<div class="results {kind}">{html}</div>'


def command_line() -> str:
    """One section for each command, from the program itself."""
    import typer

    from branchout.cli import app

    program = typer.main.get_command(app)
    context = typer.Context(program, info_name="branchout")
    parts = [
        "# Command line",
        "",
        "Generated from the program: `branchout COMMAND --help` shows the same.",
        "",
    ]
    for name in program.list_commands(context):  # type: ignore[attr-defined]
        command = program.get_command(context, name)  # type: ignore[attr-defined]
        if not command.hidden:
            parts += section(name, command, typer.Context(command, info_name=name, parent=context))
    return "\n".join(parts) + "\n"


def section(name: str, command: Any, context: Any) -> list[str]:
    """A command's usage, what it does, and a table of its arguments and options."""
    usage = " ".join(["branchout", name, *command.collect_usage_pieces(context)])
    parts = [f"## {name}", "", "```", usage, "```", "", *(command.help or "").replace("\b", "").splitlines(), ""]
    rows = [record for parameter in command.params if (record := row(parameter, context))]
    if rows:
        parts += ["| argument or option | what it is |", "|---|---|", *rows, ""]
    return parts


def row(parameter: Any, context: Any) -> str | None:
    """One line of the table; None for what `--help` hides."""
    record = parameter.get_help_record(context)
    if record is None:
        return None
    what, meaning = (re.sub(r"\s+", " ", text).replace("|", "\\|") for text in record)
    return f"| `{what.strip()}` | {meaning.strip().replace('<', '&lt;')} |"
