/** All rollouts, filtered, sorted and live. The first view. */

import * as api from "../api.js";
import { el, fill } from "../dom.js";
import { chips, menu, offers, searchField } from "../filters.js";
import { count, duration, plural, short, when } from "../format.js";
import { List } from "../list.js";
import { Paced } from "../paced.js";
import { go, href, note } from "../router.js";
import { addressOf, facts, nameOf, rewardCell, state, versions } from "../status.js";

/** @typedef {import("../api.js").Json} Json */

const CLASSES = ["graded", "agent failed", "invalid task", "infrastructure fault"];
const SUMMARY_MS = 3000; // how often the summary is reloaded while it changes
const AGAIN_MS = 1500; // how often the list is reloaded while it changes
const LIVE = ["starting", "running", "finishing"];

/** @type {import("../list.js").Column[]} */
const COLUMNS = [
  { name: "state", label: "Status", sort: "status", cell: state },
  {
    name: "name",
    label: "Rollout",
    cell: (row) =>
      el("a.clip", { href: addressOf(row.id), tabindex: "-1", title: `${nameOf(row)} (${row.id})`, text: nameOf(row) }),
  },
  {
    name: "task",
    label: "Task",
    sort: "task",
    cell: (row) => el("span.clip", { title: row.task, text: row.task || "–" }),
  },
  {
    name: "agent",
    label: "Agent",
    sort: "agent",
    cell: (row) => el("span.clip", { title: `${row.agent} ${row.agent_version ?? ""}`, text: row.agent || "–" }),
  },
  { name: "reward", label: "Reward", sort: "reward", cell: (row) => rewardCell(row.reward), num: true },
  { name: "turns", label: "Turns", sort: "turns", cell: (row) => count(row.turns), num: true },
  {
    name: "tokens",
    label: "Sampled",
    sort: "sampled_tokens",
    title: "Sampled tokens",
    cell: (row) => short(row.sampled_tokens),
    num: true,
  },
  {
    name: "version",
    label: "Policy",
    sort: "version",
    title: "Policy versions that sampled the rollout's tokens",
    cell: versions,
    num: true,
  },
  { name: "seconds", label: "Took", sort: "seconds", cell: (row) => duration(row.seconds), num: true },
  { name: "opened", label: "Started", sort: "opened", cell: (row) => when(row.opened), num: true },
];

/**
 * @param {import("../router.js").Place} place
 * @returns {import("../main.js").View}
 */
export function show(place) {
  const wanted = { status: "", class: "", agent: "", model: "", q: "", sort: "-opened", ...place.query };
  const summary = el("div.summary");
  const total = el("span.muted", { role: "status" });
  const fresh = el("button.button.is-on.fresh", { type: "button", hidden: true });
  let missed = new Set();

  const list = new List({
    label: "Rollouts",
    look: "is-rollouts",
    columns: COLUMNS,
    fetch: async (offset, limit, sort) => {
      const status = wanted.status === "live" ? LIVE : wanted.status;
      const got = await api.rollouts({ ...wanted, status, sort, offset, limit });
      return { rows: got.rollouts, total: got.total };
    },
    key: (row) => row.id,
    open: (row) => go(addressOf(row.id)),
    sort: wanted.sort,
    place: () => JSON.stringify(["rollouts", wanted]),
    sorted: (sort) => change({ sort }, false),
    counted: (n) => (total.textContent = plural(n, "rollout")),
    none: [
      "No rollouts",
      "Clear the filters, or start a rollout: turngate run, turngate batch, or a session of your own (POST /admin/sessions).",
    ],
  });

  /** @param {Object<string, string>} what @param {boolean} [fetch] */
  function change(what, fetch = true) {
    Object.assign(wanted, what);
    note(href(["rollouts"], { ...wanted, sort: wanted.sort === "-opened" ? "" : wanted.sort }));
    if (fetch) reload();
  }

  function reload() {
    missed = new Set();
    fresh.hidden = true;
    list.reload(true);
  }

  const search = searchField(wanted.q, "Search id, task, group, message", (q) => change({ q }));
  const statuses = chips(
    "Status",
    [
      ["", "All"],
      ["live", "Live"],
      ["done", "Done"],
      ["cancelled", "Cancelled"],
    ],
    wanted.status,
    (status) => change({ status }),
  );
  const classes = menu(
    "Class",
    wanted.class,
    [["", "Any class"], ...offers("", CLASSES).slice(1), ["none", "no class"]],
    (value) => change({ class: value }),
  );
  const agents = menu("Agent", wanted.agent, offers("Any agent", []), (agent) => change({ agent }));
  const models = menu("Model", wanted.model, offers("Any model", []), (model) => change({ model }));
  fresh.addEventListener("click", reload);

  const summarize = new Paced(async () => {
    let got;
    try {
      got = await api.overview();
    } catch (error) {
      return api.passOver(error);
    }
    fill(summary, numbers(got));
    statuses.counts({ "": got.rollouts, live: running(got), ...got.by_status });
    agents.offer(offers("Any agent", got.agents));
    models.offer(offers("Any model", got.models));
  }, SUMMARY_MS);
  const again = new Paced(() => list.reload(), AGAIN_MS);

  /** @param {import("../live.js").Changes} changes */
  function changed(changes) {
    summarize.soon();
    const known = list.update(changes.rollouts);
    if (known && !changes.reload && !changes.gone.length) return;
    if (list.atTop()) return again.soon();
    changes.rollouts.filter((row) => !list.index.has(row.id)).forEach((row) => missed.add(row.id));
    fresh.textContent = missed.size ? `Show ${plural(missed.size, "change")}` : "Show changes";
    fresh.hidden = false;
  }

  summarize.now();
  list.reload(true);
  const toolbar = el(
    "div.toolbar",
    { role: "search" },
    search,
    statuses,
    classes,
    agents,
    models,
    fresh,
    el("span.spread"),
    total,
  );
  return {
    element: el(
      "div.page.is-full",
      null,
      el("h1.visually-hidden", { text: "Rollouts" }),
      summary,
      toolbar,
      list.element,
    ),
    title: "Rollouts",
    keys: [{ key: "/", does: "search", run: () => search.focus() }, ...list.keys()],
    changed,
    leave: () => {
      summarize.leave();
      again.leave();
      list.leave();
    },
  };
}

/** Return the number of running rollouts. @param {Json} got */
function running(got) {
  return LIVE.reduce((sum, status) => sum + (got.by_status[status] ?? 0), 0);
}

/** @param {Json} got */
function numbers(got) {
  const failures = CLASSES.slice(1).reduce((sum, name) => sum + (got.by_class[name] ?? 0), 0);
  return facts([
    ["running now", count(running(got))],
    ["rollouts", count(got.rollouts)],
    ["groups", count(got.groups)],
    ["graded", count(got.by_class.graded ?? 0)],
    [
      "failed",
      el("a", { href: href(["failures"]), text: count(failures) }),
      "agent failed, invalid task, infrastructure fault",
    ],
    [
      "policy",
      `v${got.gateway.version}${got.gateway.paused ? " (paused)" : ""}`,
      "The current policy version",
    ],
    ["model", el("span.clip.fact-model", { title: got.gateway.model, text: got.gateway.model || "any" })],
  ]);
}
