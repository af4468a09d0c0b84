/**
 * Throttled loading: one load at a time, with pauses in between, and another load if something changed during one. Live views use it.
 */

export class Paced {
  /**
   * @param {() => Promise<any>} load reports its own errors
   * @param {number} apart milliseconds between loads, in which changes are collected
   */
  constructor(load, apart) {
    this.load = load;
    this.apart = apart;
    this.timer = 0;
    this.loading = false;
    this.left = false;
    /** @type {"" | "soon" | "now"} the kind of load requested during a load */
    this.again = "";
  }

  /** Load soon, because something has changed. */
  soon() {
    if (this.loading) this.again ||= "soon";
    else if (!this.left) this.timer ||= setTimeout(() => this.now(), this.apart);
  }

  /** Load now, because the user is waiting. */
  async now() {
    if (this.loading) this.again = "now";
    if (this.loading || this.left) return;
    clearTimeout(this.timer);
    this.timer = 0;
    this.loading = true;
    try {
      await this.load();
    } finally {
      this.loading = false;
      const { again } = this;
      this.again = "";
      if (again === "now") this.now();
      else if (again) this.soon();
    }
  }

  /** Stop loading, because the view is no longer shown. */
  leave() {
    this.left = true;
    clearTimeout(this.timer);
  }
}
