"""Where tests fork their processes from: one server, in which what is slow to load has been loaded once."""

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([
    "torch", "torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.tensor.experimental",
    "torch.distributed.run", "etc_agent.worker.session", "etc_agent.agent.launch", "launcher.routes", "launcher.run",
    "pytest",
])
