"""Starts all workers of this machine, or of several: `python -m tfdist.launch --nproc_per_node=2 -- <train flags>`.

Option names and their meaning are torchrun's. Exit codes: 0 done; 2 the input
or the environment is wrong; 130 and 143 stopped by a signal; else that of the
worker that failed first, 128 + n if signal n killed it.
"""

import os
import sys
from collections.abc import Mapping

from tfdist.config import messages
from tfdist.config.commands import standard_streams
from tfdist.errors import UserError, shown
from tfdist.launch import coordinator, node_agent
from tfdist.launch.plan import make_plan, parse
from tfdist.launch.worker_process import Events, Screen


def dry_run(plan: node_agent.LaunchPlan, environ: Mapping[str, str]) -> str:
    """Returns each worker of this node as a line for a shell, under a comment."""
    port = plan.nodes.port
    if plan.nodes.max == 1:
        with node_agent.listen(plan.nodes.addr, plan.nodes.port) as listener:
            port = listener.getsockname()[1]
    node = max(0, plan.nodes.rank)
    world, first = plan.nodes.max * plan.nproc, node * plan.nproc
    assumed = f", if each of {plan.nodes.max} nodes has as many" if plan.nodes.max > 1 else ""
    this = node_agent.Attempt(0, node, world, first, port, salt="")
    kept, lines = node_agent.inherited(environ), []
    for local_rank in range(plan.nproc):
        given = node_agent.variables(plan, this, local_rank) | {"TFDIST_SECRET": ""}  # others may read what is printed
        unset = [word for name in sorted(environ) if name not in kept and name not in given for word in ("-u", name)]
        assigned = [f"{name}={value}" for name, value in given.items() if value]
        lines.append(f"# rank {first + local_rank} of {world}{assumed}; TFDIST_SECRET is not shown")
        lines.append(messages.shell(["env", *unset, *assigned, *plan.command]))
    return "\n".join(lines)


def main() -> None:
    standard_streams.fill()
    try:
        options, rest = parse(sys.argv[1:])
        plan = make_plan(options, rest, os.environ)
        if options.dry_run:
            print(dry_run(plan, os.environ))
            return
        with Events() as events:
            sys.exit(coordinator.run(plan, events, Screen()))
    except UserError as error:
        print(f"tfdist: error: {shown(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("tfdist: interrupted, nothing was started", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
