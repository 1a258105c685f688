"""wheels.py -- single files of the wheels on PyPI, which are large: only their bytes are fetched

The index names a wheel's address, and the few bytes of a zip that matter are asked for by their range. What was fetched stays
in UPIPE_CACHE (build/cache).
"""

import io
import json
import os
import re
import urllib.error
import urllib.request
import zipfile

INDEX = os.environ.get('PIP_INDEX_URL', 'https://pypi.org/simple').rstrip('/')
SECONDS = 60  # of one request
FAILURES = (OSError, urllib.error.URLError, ValueError)  # there is no network, or another server


class Ranges(io.RawIOBase):
    """A file behind an address, of which only what is read is fetched."""

    def __init__(self, address, size):
        super().__init__()
        self.address, self.size, self.at = address, size, 0

    def seekable(self):
        return True

    def readable(self):
        return True

    def tell(self):
        return self.at

    def seek(self, offset, whence=0):
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer):
        end = min(self.at + len(buffer), self.size)
        if end <= self.at:
            return 0
        asked = urllib.request.Request(self.address, headers={'Range': f'bytes={self.at}-{end - 1}'})
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            if answer.status != 206:
                raise urllib.error.URLError('the server gives no part of a file')
            data = answer.read()
        buffer[:len(data)] = data
        self.at += len(data)
        return len(data)


def listed(package):
    """Version -> (address, bytes) of a wheel for this kind of system and Python's, the newest last."""
    asked = urllib.request.Request(f'{INDEX}/{package}/', headers={'Accept': 'application/vnd.pypi.simple.v1+json'})
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        files = json.load(answer)['files']
    found = {}
    for file in files:
        name = re.fullmatch(package.replace('-', '_') + r'-(\d+(?:\.\d+)+)-.*x86_64\.whl', file['filename'])
        if name and not file.get('yanked'):
            found[tuple(map(int, name.group(1).split('.')))] = file['url'], file['size']
    return dict(sorted(found.items()))


def fetched(folder, address, size, inside):
    """Files of a wheel below `inside`, in this folder."""
    if os.path.exists(os.path.join(folder, 'whole')):
        return folder
    with zipfile.ZipFile(io.BufferedReader(Ranges(address, size), 1 << 18)) as wheel:
        for name in wheel.namelist():
            if not re.match(inside, name) or name.endswith('/'):
                continue
            path = os.path.join(folder, re.sub(inside, '', name))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(f'{path}.{os.getpid()}', 'wb') as out:
                out.write(wheel.read(name))
            os.replace(f'{path}.{os.getpid()}', path)
    with open(os.path.join(folder, 'whole'), 'wb'):
        return folder
