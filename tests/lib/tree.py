"""tree.py -- what the checks of the tree share: its files, and breaches, one a line"""

import os
import subprocess


class Report:
    """report(where, ..., sentence) prints a breach and counts it."""

    def __init__(self):
        self.count = 0

    def __call__(self, *words):
        self.count += 1
        print(':'.join(map(str, words[:-1])) + (': ' if words[1:] else '') + words[-1])


def read_text(path):
    with open(path, encoding='utf-8') as source:
        return source.read()


def list_files(top):
    """What git tracks or would track; in a release archive, every file outside build folders."""
    if os.path.exists(os.path.join(top, '.git')):
        listed = subprocess.run(['git', '-C', top, 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
                                capture_output=True, check=False)
        if listed.returncode == 0:
            names = listed.stdout.decode().split('\0')
            return sorted(name for name in names if name and os.path.isfile(os.path.join(top, name)))
    names = []
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders
                      if name not in ('.git', '__pycache__') and not (folder == top and name.startswith('build'))]
        names += [os.path.relpath(os.path.join(folder, name), top) for name in files]
    return sorted(names)
