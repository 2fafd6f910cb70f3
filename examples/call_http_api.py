"""Ask a running Branchout server about pictures, with nothing but Python's standard library.

    branchout serve v2/                                  # in another terminal
    python examples/call_http_api.py photo.jpg more.jpg

The same from a shell: curl -F files=@photo.jpg http://127.0.0.1:8000/predict
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
import uuid
from pathlib import Path


def as_form(pictures: list[Path]) -> tuple[bytes, str]:
    """Pictures as a browser's form would send them, all in the field `files`; and the type of that body."""
    boundary = uuid.uuid4().hex
    parts = []
    for picture in pictures:
        name = picture.name.replace('"', "%22")
        header = f'Content-Disposition: form-data; name="files"; filename="{name}"\r\n'
        parts.append(f"--{boundary}\r\n{header}Content-Type: application/octet-stream\r\n\r\n".encode())
        parts.append(picture.read_bytes() + b"\r\n")
    return b"".join([*parts, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"


def ask(server: str, pictures: list[Path]) -> list[dict]:
    body, kind = as_form(pictures)
    request = urllib.request.ExtendConfig(f"{server}/predict", body, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["predictions"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, nargs="+")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    options = parser.parse_args()
    try:
        predictions = ask(options.server, options.pictures)
    except urllib.error.HTTPError as error:
        sys.exit(f"the server refused: {error.code} {error.read().decode(errors='replace')}")
    except urllib.error.URLError as error:
        sys.exit(f"no server answers at {options.server} ({error.reason}); start one: branchout serve v2/")
    for prediction in predictions:
        if "error" in prediction:  # one picture among several that could not be read
            print(prediction["error"])
            continue
        told = [
            f"{answer['class']} {answer['probability']:.1%}" + (" (new)" if answer["new"] else "")
            for answer in prediction["answers"]
        ]
        print(f"{prediction['file']}: {', '.join(told)}")


if __name__ == "__main__":
    main()
