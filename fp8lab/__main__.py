"""`python -m fp8lab`: set-up commands from the standard library alone, the rest from the CLI.

The set-up commands (`lab`, `test`, `vllm`, …) must run in a bare checkout, before torch or any
other package is there, so they go to `bootstrap` without importing the CLI.
"""

import sys


def main(argv=None):
    """Run one command line (default: `sys.argv[1:]`) and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    from fp8lab import bootstrap

    if argv and argv[0] in bootstrap.COMMANDS:
        return bootstrap.main(argv)
    try:
        from fp8lab.cli import main as cli_main

        return cli_main(argv)
    except ModuleNotFoundError as error:
        if (error.name or "fp8lab").split(".")[0] == "fp8lab":
            raise
        print(bootstrap.missing_package_hint(error.name), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
