#!/usr/bin/env python3
"""Stands in for a program: writes down with which arguments it was called, and answers as the real one would."""

import json
import os
import subprocess
import sys
from pathlib import Path

name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
with Path(os.environ["COMMANDS"]).open("a") as file:
    file.write(json.dumps({"command": [name, *arguments], "folder": str(Path.cwd())}) + "\n")


def kubectl(arguments: list[str]) -> None:
    """What kubectl does without a cluster is done for real."""
    real = os.environ["KUBECTL"]
    if arguments[:2] == ["create", "secret"]:
        subprocess.run([real, *arguments, "--dry-run=client", "-o", "name"], check=True)
    elif arguments[0] == "kustomize":
        subprocess.run([real, *arguments], check=True, stdout=subprocess.DEVNULL)


if name == "kubectl":
    kubectl(arguments)
elif name == "podman" and arguments[:2] == ["image", "inspect"]:
    print("docker.io/library/python@sha256:" + "0" * 64)
elif name == "make" and arguments[0] == "images":
    print("IMAGE_REGISTRY=registry.example.com/ml IMAGE_TAG=0123456789ab")
