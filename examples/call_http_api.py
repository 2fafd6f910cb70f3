"""Classify images with a running Branchout server, using Python's standard library only.

    branchout serve v2/                                  # in another terminal
    python examples/call_http_api.py photo.jpg more.jpg

The same from a shell: curl -F files=@photo.jpg http://127.0.0.1:8000/predict
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
import uuid
from pathlib import Path


def as_form(images: list[Path]) -> tuple[bytes, str]:
    """The body of a form with all images in the field `files`, and its Content-Type."""
    boundary = uuid.uuid4().hex
    parts = []
    for image in images:
        name = image.name.replace('"', "%22")
        header = f'Content-Disposition: form-data; name="files"; filename="{name}"\r\n'
        parts.append(f"--{boundary}\r\n{header}Content-Type: application/octet-stream\r\n\r\n".encode())
        parts.append(image.read_bytes() + b"\r\n")
    return b"".join([*parts, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"


def predict(server: str, images: list[Path], token: str | None) -> list[dict]:
    body, kind = as_form(images)
    headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(f"{server}/predict", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["predictions"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="+")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--token", default=os.environ.get("BRANCHOUT_TOKEN"), help="for a server with a token")
    options = parser.parse_args()
    try:
        predictions = predict(options.server, options.images, options.token)
    except urllib.error.HTTPError as error:
        sys.exit(f"the server refused: {error.code} {error.read().decode(errors='replace')}")
    except urllib.error.URLError as error:
        sys.exit(f"no server answers at {options.server} ({error.reason}); start one: branchout serve v2/")
    for prediction in predictions:
        if "error" in prediction:  # one image among several that could not be read
            print(prediction["error"])
            continue
        answers = [
            f"{answer['class']} {answer['probability']:.1%}" + (" (new)" if answer["new"] else "")
            for answer in prediction["answers"]
        ]
        print(f"{prediction['file']}: {', '.join(answers)}")


if __name__ == "__main__":
    main()
