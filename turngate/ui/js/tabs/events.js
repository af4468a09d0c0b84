/** The events of a rollout, live while this tab is open: turns, stages, limits, host tools, the outcome. */

import * as api from "../api.js";
import { el } from "../dom.js";
import { clock } from "../format.js";
import { firstLine, plain } from "../text.js";

const MOST = 2000; // maximum number of rows

export class EventsTab {
  /** @param {import("../record.js").Record} record */
  constructor(record) {
    this.record = record;
    this.rows = el("tbody");
    this.element = el(
      "section.panel.table-scroll",
      null,
      el(
        "table.plain.events",
        null,
        el(
          "thead",
          null,
          el(
            "tr",
            null,
            el("th.num", { text: "seq" }),
            el("th", { text: "time" }),
            el("th", { text: "kind" }),
            el("th", { text: "data" }),
          ),
        ),
        this.rows,
      ),
    );
    /** @type {import("../keys.js").Binding[]} */
    this.keys = [];
    /** @type {EventSource | null} */
    this.source = null;
    this.last = 0; // the newest event shown
  }

  async show() {
    if (this.source) return;
    this.source = new EventSource(api.eventsOf(this.record.id, this.last));
    for (const kind of [
      "opened",
      "turn",
      "limit",
      "tool",
      "answered",
      "sealed",
      "cancelled",
      "outcome",
      "verified",
      "deleted",
      "stage",
      "rollout",
      "graded",
      "note",
    ]) {
      this.source.addEventListener(kind, (event) => this.#add(JSON.parse(event.data)));
    }
  }

  async update() {}

  leave() {
    this.source?.close();
    this.source = null;
  }

  /** @param {api.Json} event */
  #add(event) {
    if (event.seq <= this.last) return; // sent again after a reconnect
    this.last = event.seq;
    const facts = Object.entries(event.data ?? {}).filter(([, value]) => value !== null && value !== "");
    const text = facts
      .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`)
      .join(" · ");
    const line = el(
      "tr",
      null,
      el("td.num.muted", { text: event.seq }),
      el("td.mono", { text: clock(event.time) }),
      el("td", { text: event.kind }),
      el("td.event-text", null, plain(firstLine(text, 400))),
    );
    this.rows.prepend(line); // the newest first
    if (this.rows.childElementCount > MOST) this.rows.lastElementChild?.remove();
  }
}
