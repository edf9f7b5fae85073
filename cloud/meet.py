"""Where the machines of an elastic run find each other; see docs/several-machines.md.

python -m cloud.meet [PORT]
"""

from __future__ import annotations

import argparse
import signal

from torch.distributed import TCPStore

PORT = 29400
"""The port that torch's c10d rendezvous assumes where none is named."""


def main() -> None:
    """Serve the store until SIGTERM or Ctrl-C. It keeps a few kilobytes, and needs no GPU."""
    parser = argparse.ArgumentParser(prog="python -m cloud.meet", description=__doc__)
    parser.add_argument("port", nargs="?", type=int, default=PORT, help=f"default {PORT}")
    port = parser.parse_args().port
    if not 0 <= port < 1 << 16:
        parser.error(f"argument PORT: {port} is no port. Use 1 to 65535, or 0 for a free one.")
    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:  # torch's DistNetworkError
        parser.error(f"port {port} cannot be opened: {error}. Stop what uses it, or name another.")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # pause() would raise KeyboardInterrupt
    print(f"machines can meet here, at port {store.port}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
