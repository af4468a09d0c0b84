"""A summary of a web server's log on standard input, as JSON."""

import json
import sys


def main():
    lines = sys.stdin.read().split("\n")
    statuses, paths, total, seconds = {}, {}, 0, []
    for line in lines:
        _, _, path, status, size, taken = line.split(" ")
        kind = status[0] + "xx"
        statuses[kind] = statuses.get(kind, 0) + 1
        total += int(size)
        paths[path] = paths.get(path, 0) + 1
        seconds.append(taken)
    seconds.sort()
    top = sorted(paths.items(), key=lambda item: item[1])[:3]
    print(
        json.dumps(
            {
                "requests": len(lines),
                "invalid": 0,
                "statuses": statuses,
                "bytes": total,
                "paths": top,
                "p95": seconds[int(len(seconds) * 0.95)],
            }
        )
    )


main()
