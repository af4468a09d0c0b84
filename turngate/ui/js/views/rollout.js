/** One rollout: a header with its state, and tabs below. It updates while the rollout runs. */

import { actionsOf, cancel, exportOf } from "../actions.js";
import * as api from "../api.js";
import { el, fill } from "../dom.js";
import { count, duration, when } from "../format.js";
import { seen } from "../hidden.js";
import { failed, loading } from "../notice.js";
import { Paced } from "../paced.js";
import { Record } from "../record.js";
import { go, href } from "../router.js";
import { facts, lives, nameOf, rewardCell, state, versions } from "../status.js";
import { Conversation } from "../tabs/conversation.js";
import { Details } from "../tabs/details.js";
import { EventsTab } from "../tabs/events.js";
import { TokensTab } from "../tabs/tokens.js";
import { TreeTab } from "../tabs/treetab.js";

/** @typedef {import("../api.js").Json} Json */

/** @type {[string, string][]} */
const TABS = [
  ["", "Conversation"],
  ["tokens", "Tokens"],
  ["tree", "Tree"],
  ["events", "Events"],
  ["details", "Details"],
];
const LATER_MS = 400; // changes within this time are fetched together

/**
 * @param {import("../router.js").Place} place
 * @returns {import("../main.js").View}
 */
export function show(place) {
  const record = new Record(place.parts[0] ?? "");
  const head = el("div.rollout-head");
  const tabs = el("nav.tabs", { "aria-label": "Rollout" });
  const body = el("div.rollout-body");
  const element = el("div.page.rollout", null, head, tabs, body);
  /** @type {Object<string, any>} opened tabs */
  const opened = {};
  /** @type {import("../keys.js").Binding[]} */
  const keys = [];
  let now = "";
  let shown = false; // whether a tab was shown

  function drawHead() {
    fill(head, ...header(record, refresh));
    document.title = seen(`${nameOf(record.row)} · Turngate`);
  }

  /** @param {string} name @returns {any} */
  function tab(name) {
    const scroller = /** @type {HTMLElement} */ (document.getElementById("main"));
    opened[name] ??=
      name === "tokens"
        ? new TokensTab(record)
        : name === "tree"
          ? new TreeTab(record)
          : name === "events"
            ? new EventsTab(record)
            : name === "details"
              ? new Details(record)
              : new Conversation(record, scroller);
    return opened[name];
  }

  /** @param {import("../router.js").Place} at */
  async function open(at) {
    const name = TABS.some(([one]) => one === at.parts[1]) ? at.parts[1] : "";
    if (now !== name && now === "events") tab("events").leave();
    now = name;
    fill(
      tabs,
      ...TABS.map(([one, label]) =>
        el("a", {
          href: href(one ? ["rollout", record.id, one] : ["rollout", record.id]),
          "aria-current": one === name ? "page" : null,
          text: label,
        }),
      ),
    );
    element.classList.toggle("is-full", name === "tokens");
    fill(body, tab(name).element);
    keys.splice(0, keys.length, ...tab(name).keys, ...ownKeys);
    await tab(name).show(at);
  }

  const ownKeys = [
    ...TABS.map(([name, label], i) => ({
      key: String(i + 1),
      does: label.toLowerCase(),
      run: () => go(href(name ? ["rollout", record.id, name] : ["rollout", record.id])),
    })),
    { key: "c", does: "cancel the rollout", run: () => record.detail.can?.cancel && cancel(record, refresh) },
    { key: "e", does: "export", run: () => record.detail.can && exportOf(record) },
    {
      key: "u",
      does: "go to the group",
      run: () => go(record.row?.group ? href(["group", record.row.group]) : href(["rollouts"])),
    },
  ];

  const load = new Paced(async () => {
    const first = !shown;
    if (first) fill(body, loading());
    try {
      await record.load();
      if (load.left) return;
      drawHead();
      if (first) await open(place);
      else await tab(now).update();
      shown = true;
    } catch (error) {
      if (!first) return api.passOver(error);
      fill(body, failed(error, refresh));
      if (!(error instanceof api.Refused)) throw error;
    }
  }, LATER_MS);

  function refresh() {
    load.now();
  }

  refresh();
  return {
    element,
    title: "Rollout",
    keys,
    changed: (changes) => {
      if (changes.reload || changes.rollouts.some((row) => row.id === record.id)) load.soon();
    },
    moved: (at) => {
      if (!record.row) return false;
      open(at).catch((error) =>
        fill(
          body,
          failed(error, () => open(at)),
        ),
      );
      return true;
    },
    leave: () => {
      load.leave();
      for (const one of Object.values(opened)) one.leave();
    },
  };
}

/** @param {Record} record @param {() => void} refresh */
function header(record, refresh) {
  const { rollout: row, config, totals, live } = record.detail;
  const limits = config?.limits ?? {};
  const of = (/** @type {number | null | undefined} */ most) =>
    most ? el("small", { text: ` of ${count(most)}` }) : "";
  const crumbs = el(
    "div.crumbs",
    null,
    el("a", { href: href(["rollouts"]), text: "Rollouts" }),
    row.group && ["›", el("a", { href: href(["group", row.group]), text: row.group })],
  );
  const last = live?.last_error;
  return [
    crumbs,
    el(
      "div.view-head",
      null,
      el("h1", { text: nameOf(row) }),
      state(row),
      el(
        "div.actions",
        null,
        row.group && el("a.button", { href: href(["group", row.group]), text: "Group" }),
        ...actionsOf(record, refresh),
      ),
    ),
    facts([
      ["reward", rewardCell(row.reward), row.message],
      ["turns", [count(row.turns), of(limits.turns)]],
      ["sampled tokens", [count(row.sampled_tokens), of(limits.sampled_tokens)]],
      ["trained tokens", count(totals?.trained_tokens)],
      ["training rows", count(totals?.rows)],
      ["took", [duration(row.seconds), limits.seconds ? el("small", { text: ` of ${duration(limits.seconds)}` }) : ""]],
      ["policy", versions(row)],
      ["agent", row.agent || "–"],
      ["model", el("span.clip.fact-model", { title: row.model, text: row.model || "–" })],
      ["started", when(row.opened)],
    ]),
    row.stop && row.status !== "running" && el("p.muted", { text: `Session ended: ${row.stop}` }),
    record.detail.error &&
      el("p.banner.is-bad", {
        role: "alert",
        text: `${record.detail.error.class || record.detail.error.boundary}: ${record.detail.error.message}`,
      }),
    !record.detail.error &&
      !lives(row) &&
      (totals?.warnings ?? []).map((/** @type {string} */ text) => el("p.banner", { role: "note", text: capital(text) })),
    !record.detail.error &&
      last &&
      el("p.banner", { text: `The last call failed (${last.boundary}): ${last.message}` }),
  ];
}

/** @param {string} text */
function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
