"""Nothing in the checkout knows the machine it was written on."""

import re

from tests.meta.checkout import ROOT, files

# Written in pieces, so that this file does not find itself.
FOREIGN = re.compile(
    "|".join(
        [
            r"(?<![\w./~-])/" + r"(?:root|home|work|tmp/w|opt/(?:wheels|pypi))\b",
            r"(?:index-|find-|trusted-" + r")(?:url|links|host)\b",
            r"https?://[\w.-]*" + r"(?:pypi|artifactory|registry|mirror)",
        ]
    )
)


def test_no_file_names_a_machine_path_or_a_package_host() -> None:
    found = []
    for path in files():
        content = path.read_bytes()
        if b"\0" in content or path.name == "LICENSE":
            continue
        for number, line in enumerate(content.decode("utf-8").splitlines(), start=1):
            if FOREIGN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []
