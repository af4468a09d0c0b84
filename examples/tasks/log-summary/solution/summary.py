"""A summary of a web server's log on standard input, as JSON."""

import json
import math
import sys
from collections import Counter


def main():
    statuses, paths, seconds = Counter(), Counter(), []
    invalid = total = 0
    for line in sys.stdin.buffer:
        line = line.decode("utf-8", "replace")
        if not line.strip():
            continue
        try:
            _, _, path, status, size, taken = line.split()
            status, size, taken = int(status), 0 if size == "-" else int(size), float(taken)
            if not math.isfinite(taken):
                raise ValueError("not finite")
        except ValueError:
            invalid += 1
            continue
        statuses[f"{status // 100}xx"] += 1
        paths[path.partition("?")[0]] += 1
        total += size
        seconds.append(taken)
    seconds.sort()
    print(
        json.dumps(
            {
                "requests": len(seconds),
                "invalid": invalid,
                "statuses": statuses,
                "bytes": total,
                "paths": sorted(paths.items(), key=lambda item: (-item[1], item[0]))[:3],
                "p95": seconds[-(-len(seconds) * 95 // 100) - 1] if seconds else None,
            }
        )
    )


main()
