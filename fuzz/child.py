"""One target under atheris; started by `python -m fuzz`."""

import sys

import atheris

with atheris.instrument_imports(include=["swarm", "msgpack", "pydantic"]):
    from fuzz.targets import TARGETS

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    # What libFuzzer starts again when it merges inputs.
    command = f"{sys.executable} -m fuzz.child {name}"
    atheris.Setup([command, *arguments], TARGETS[name])
    atheris.Fuzz()
