"""What the torchrun scenario trains: an all-reduce in a loop, until a file named `stop` appears.

Appends one JSON line per step to FOLDER/<pid>.jsonl.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
names = {"node": "NODE", "rank": "RANK", "world": "WORLD_SIZE", "port": "MASTER_PORT"}
facts = {name: os.environ[variable] for name, variable in names.items()} | {"pid": os.getpid()}
must_stop = False
with (folder / f"{os.getpid()}.jsonl").open("a") as steps:
    while not must_stop:
        ballot = torch.tensor([1.0, float((folder / "stop").exists())])
        dist.all_reduce(ballot)
        print(json.dumps({**facts, "present": int(ballot[0]), "time": time.time()}), file=steps, flush=True)
        must_stop = bool(ballot[1])
        time.sleep(0.05)
dist.destroy_process_group()
