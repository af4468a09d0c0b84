/** Failures by class and message, with the logs of the rollouts that failed. */

import * as api from "../api.js";
import { el, fill } from "../dom.js";
import { searchField } from "../filters.js";
import { count, plural } from "../format.js";
import { empty, failed, into, loading } from "../notice.js";
import { Paced } from "../paced.js";
import { href, note } from "../router.js";
import { addressOf, classBadge } from "../status.js";
import { block, plain } from "../text.js";

/** @typedef {import("../api.js").Json} Json */

/** @type {Object<string, string>} */
const MEANS = {
  "agent failed":
    "The agent failed, timed out, reached a limit, or left nothing to grade. " +
    "The batch's options decide whether the rollout scores 0 or is excluded.",
  "invalid task": "The setup or the grader fails no matter what the agent does. Find the cause with turngate tasks check.",
  "infrastructure fault": "A sandbox, the engine, the gateway or a disk failed, and so did every retry. The rollout is never scored.",
  cancelled: "Cancelled by a user, replaced by another attempt, or too old for the current policy version.",
  damaged: "The session or its outcome cannot be read from the store.",
};

/**
 * @param {import("../router.js").Place} place
 * @returns {import("../main.js").View}
 */
export function show(place) {
  const wanted = { group: "", ...place.query };
  const body = el("div.page-part", null, loading());
  const load = new Paced(async () => {
    try {
      fill(body, ...drawn(await api.failures({ group: wanted.group })));
    } catch (error) {
      fill(
        body,
        failed(error, () => load.now()),
      );
    }
  }, 0); // only on request

  const again = el("button.button.is-on", { type: "button", text: "Show new failures", hidden: true });
  again.addEventListener("click", () => {
    again.hidden = true;
    load.now();
  });
  const search = searchField(wanted.group, "Groups starting with", (group) => {
    wanted.group = group;
    note(href(["failures"], wanted));
    load.now();
  });
  load.now();
  return {
    element: el(
      "div.page",
      null,
      el("div.view-head", null, el("h1", { text: "Failures" })),
      el("div.toolbar", { role: "search" }, search, again),
      body,
    ),
    title: "Failures",
    keys: [{ key: "/", does: "filter by group", run: () => search.focus() }],
    changed: (changes) => {
      if (changes.rollouts.some((row) => row.status === "cancelled" || (row.class && row.class !== "graded")))
        again.hidden = false;
    },
    leave: () => load.leave(),
  };
}

/** @param {Json} got */
function drawn(got) {
  const classes = got.classes.filter((/** @type {Json} */ one) => one.count);
  if (!classes.length)
    return [
      empty("Nothing has failed", "Rollouts that were not graded appear here, by class and message, with their logs."),
    ];
  return classes.map((/** @type {Json} */ one) =>
    el(
      "section.panel",
      null,
      el(
        "div.panel-head",
        null,
        classBadge(one.class),
        el("strong", { text: plural(one.count, "rollout") }),
        one.class !== "damaged" && // the list has no filter for these
          el("a", {
            href: href(["rollouts"], one.class === "cancelled" ? { status: "cancelled" } : { class: one.class }),
            text: "show all",
          }),
        el("span.muted", { text: MEANS[one.class] ?? "" }),
      ),
      ...one.messages.map(failure),
    ),
  );
}

/** @param {Json} one */
function failure(one) {
  const logs = el("div");
  const links = one.rollouts.map((/** @type {string} */ id) =>
    el("a.mono", { href: addressOf(id, "details"), text: id }),
  );
  const made = el(
    "details.failure",
    null,
    el(
      "summary",
      null,
      el("span.failure-count", { text: count(one.count) }),
      el("span.failure-text", null, plain(one.message || "(no message)")),
    ),
    el(
      "div.failure-body",
      null,
      el(
        "div.toolbar",
        null,
        el("span.muted", { text: one.count > links.length ? `${links.length} of them:` : "" }),
        ...links,
      ),
      logs,
    ),
  );
  made.addEventListener("toggle", () => {
    if (made.open && !logs.childElementCount && one.rollouts.length) into(logs, () => logsOf(one.rollouts[0]));
  });
  return made;
}

/** @param {string} id */
async function logsOf(id) {
  const { logs, error } = await api.rollout(id);
  const parts = Object.entries(logs)
    .filter(([, text]) => text)
    .flatMap(([name, text]) => [el("h3", { text: `${name} of ${id}` }), block(String(text), "pre.log")]);
  if (error?.stage)
    parts.unshift(el("p.muted", { text: `in stage ${error.stage}${error.boundary ? `, ${error.boundary}` : ""}` }));
  return parts.length ? el("div", null, ...parts) : el("p.muted", { text: "There are no logs." });
}
