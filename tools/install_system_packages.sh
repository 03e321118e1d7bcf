#!/usr/bin/env bash
# System packages the tests want: the full data set, Slurm, Open MPI, network namespaces, a browser. Without them those tests are skipped.
set -euo pipefail
packages=(dataset-fashion-mnist slurmctld slurmd slurm-client munge openmpi-bin iproute2 chromium)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "system packages: all there"
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "install_system_packages.sh: no apt-get here; install by hand: ${missing[*]}" >&2
    exit 1
fi
run() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }
run apt-get update -qq
DEBIAN_FRONTEND=noninteractive run apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
echo "system packages: installed ${missing[*]}"
