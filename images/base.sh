#!/usr/bin/env bash
# Make a base image from Debian's packages alone, for where no image registry can be reached, and print its id.
# As root, with debootstrap and podman or docker: `make images BASE=$(images/base.sh)`.
set -euo pipefail

engine=${CONTAINER_ENGINE:-$(command -v podman || command -v docker || true)}
for needed in "${engine:-podman}" debootstrap; do
  command -v "$needed" >/dev/null || { echo "error: $needed is needed: apt-get install podman debootstrap" >&2; exit 2; }
done
((EUID == 0)) || { echo "error: debootstrap works as root only" >&2; exit 2; }

folder=$(mktemp --directory)
trap 'rm -rf --one-file-system "$folder"' EXIT
# In a mount namespace of its own: what debootstrap mounts goes away with it.
unshare --mount debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv \
  bookworm "$folder" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$folder.log" 2>&1 ||
  { tail -n 20 "$folder.log" >&2; exit 1; }
rm "$folder.log"
tar --directory "$folder" --one-file-system --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' --create . |
  "$engine" import - localhost/grpo-pipeline/debian:bookworm >/dev/null
"$engine" image inspect --format '{{.Id}}' localhost/grpo-pipeline/debian:bookworm
