"use strict";
// The timeline: lanes of events on a canvas. Only what is in view is visited, and of the events that fall on one
// pixel of a lane only as many are painted as can be told apart, so 10^5 events cost a few milliseconds.
(() => {
  const ROW = 15, GAP = 2, TOP = 22, LEFT = 150, MAX_HEIGHT = 620;
  const BRIGHT = new Set(["#d3d7dd", "#eceef1", "#edae49", "#f6f0d8"]);
  const hover = document.getElementById("hover");

  function decode(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Uint32Array(bytes.buffer);
  }

  function seconds(value) {
    const size = Math.abs(value);
    if (size >= 1 || size === 0) return `${value.toFixed(size < 10 ? 3 : size < 1000 ? 2 : 0)} s`;
    return size >= 1e-3 ? `${(value * 1e3).toFixed(2)} ms` : `${(value * 1e6).toFixed(0)} µs`;
  }

  class Timeline {
    constructor(section, data) {
      this.section = section;
      this.data = data;
      for (const name of ["start", "end", "step", "label", "text"]) this[name] = decode(data[name]);
      this.canvas = section.querySelector("canvas");
      this.context = this.canvas.getContext("2d");
      this.last = this.end.reduce((a, b) => Math.max(a, b), 1);
      this.colors = data.colors;
      // Every other request of a lane, to tell neighbours apart.
      this.paler = data.colors.map((color) => color + "b0");
      this.hiddenLabels = new Set();
      this.filter = { step: "", rank: "", text: "" };
      this.view = { from: 0, to: this.last, row: 0 };
      this.firsts = data.lanes.map((lane, i) => [lane.first, i + 1 < data.lanes.length ? data.lanes[i + 1].first : data.count]);
      this.fillControls();
      this.applyFilter();
      this.listen();
      new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
      this.resize();
    }

    fillControls() {
      const fill = (name, values) => {
        const select = this.section.querySelector(`[data-filter=${name}]`);
        select.replaceChildren(new Option("all", ""), ...values.map((v) => new Option(v, v)));
      };
      fill("step", [...new Set(this.step)].sort((a, b) => a - b));
      fill("rank", [...new Set(this.data.lanes.map((lane) => lane.rank))]);
      const legend = this.section.querySelector(".legend");
      this.data.labels.forEach((label, number) => {
        const item = document.createElement("label"), box = document.createElement("input"), swatch = document.createElement("i");
        box.type = "checkbox";
        box.checked = true;
        box.dataset.label = label;
        swatch.style.background = this.colors[number];
        box.addEventListener("change", () => {
          box.checked ? this.hiddenLabels.delete(number) : this.hiddenLabels.add(number);
          this.applyFilter();
          this.draw();
        });
        item.append(box, swatch, label);
        legend.append(item);
      });
    }

    // Which events are shown, and the lanes that have any.
    applyFilter() {
      const { step, rank, text } = this.filter, wanted = text.toLowerCase();
      const shownText = this.data.texts.map((t) => t.toLowerCase().includes(wanted));
      const shownLabel = this.data.labels.map((label, n) => !this.hiddenLabels.has(n));
      const labelMatches = this.data.labels.map((label) => label.toLowerCase().includes(wanted));
      this.shown = new Uint8Array(this.data.count);
      this.rows = [];
      this.count = 0;
      let from = this.last, to = 0;
      this.data.lanes.forEach((lane, number) => {
        if (rank !== "" && String(lane.rank) !== rank) return;
        const [first, end] = this.firsts[number];
        let any = false;
        for (let i = first; i < end; i++) {
          if (!shownLabel[this.label[i]] || !(shownText[this.text[i]] || labelMatches[this.label[i]])) continue;
          if (step !== "" && String(this.step[i]) !== step) continue;
          this.shown[i] = 1;
          any = true;
          this.count++;
          from = Math.min(from, this.start[i]);
          to = Math.max(to, this.end[i]);
        }
        if (any) this.rows.push(number);
      });
      this.range = this.count ? [from, Math.max(to, from + 1)] : [0, this.last];
    }

    listen() {
      for (const control of this.section.querySelectorAll("[data-filter]")) {
        control.addEventListener("input", () => {
          this.filter[control.dataset.filter] = control.value;
          this.applyFilter();
          this.view.row = 0;
          this.all();
        });
      }
      for (const button of this.section.querySelectorAll("[data-zoom]")) {
        button.addEventListener("click", () => {
          button.dataset.zoom === "all" ? this.all() : this.zoom(Number(button.dataset.zoom), 0.5);
        });
      }
      this.canvas.addEventListener("wheel", (event) => {
        event.preventDefault();
        if (event.shiftKey) return this.scroll(Math.sign(event.deltaY || event.deltaX) * 3);
        this.zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) / 300), this.share(event.offsetX));
      }, { passive: false });
      this.canvas.addEventListener("dblclick", () => this.all());
      this.canvas.addEventListener("pointerdown", (event) => {
        this.drag = { x: event.offsetX, y: event.offsetY, view: { ...this.view } };
        this.canvas.setPointerCapture(event.pointerId);
      });
      this.canvas.addEventListener("pointerup", () => { this.drag = null; });
      this.canvas.addEventListener("pointerleave", () => { hover.hidden = true; });
      this.canvas.addEventListener("pointermove", (event) => this.drag ? this.pan(event) : this.point(event));
    }

    share(x) { return Math.max(0, (x - LEFT) / (this.width - LEFT)); }

    zoom(factor, share) {
      const { from, to } = this.view, span = to - from, at = from + share * span;
      const wanted = Math.min(this.last * 1.05, Math.max(10, span * factor));
      this.view.from = at - share * wanted;
      this.view.to = this.view.from + wanted;
      this.clamp();
    }

    all() {
      [this.view.from, this.view.to] = this.range;
      this.resize();
    }

    pan(event) {
      const { x, y, view } = this.drag, span = view.to - view.from;
      const moved = ((x - event.offsetX) / (this.width - LEFT)) * span;
      this.view.from = view.from + moved;
      this.view.to = view.to + moved;
      this.view.row = view.row + (y - event.offsetY) / ROW;
      this.clamp();
    }

    scroll(rows) { this.view.row += rows; this.clamp(); }

    clamp() {
      const span = this.view.to - this.view.from, room = Math.floor((this.height - TOP) / ROW);
      this.view.from = Math.max(-0.02 * this.last, Math.min(this.view.from, this.last * 1.02 - span * 0.5));
      this.view.to = this.view.from + span;
      this.view.row = Math.max(0, Math.min(this.view.row, this.rows.length - room));
      this.later();
    }

    later() {
      if (this.waiting) return;
      this.waiting = true;
      requestAnimationFrame(() => { this.waiting = false; this.draw(); });
    }

    resize() {
      this.width = this.canvas.parentElement.clientWidth;
      this.height = Math.min(MAX_HEIGHT, TOP + Math.max(this.rows.length, 1) * ROW + 4);
      const ratio = window.devicePixelRatio || 1;
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.canvas.style.height = `${this.height}px`;
      this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.draw();
    }

    draw() {
      const began = performance.now(), c = this.context, { from, to } = this.view;
      this.scale = (this.width - LEFT) / (to - from);
      c.clearRect(0, 0, this.width, this.height);
      this.drawGrid();
      c.save();
      c.beginPath();
      c.rect(LEFT, TOP, this.width - LEFT, this.height - TOP);
      c.clip();
      this.painted = 0;
      this.eachRow((number, y) => this.drawLane(number, y));
      c.restore();
      c.font = "11px system-ui, sans-serif";
      c.fillStyle = "#1b2028";
      this.eachRow((number, y) => c.fillText(this.data.lanes[number].name, 8, y + ROW - 5, LEFT - 14));
      this.drawMs = performance.now() - began;
      const unit = this.data.unit;
      this.section.querySelector(".status").textContent =
        `${this.count.toLocaleString("en")} events, ${this.rows.length} lanes, ${seconds((to - from) * unit)} in view`;
    }

    eachRow(visit) {
      const first = Math.floor(this.view.row), rows = Math.ceil((this.height - TOP) / ROW) + 1;
      for (let i = first; i < Math.min(this.rows.length, first + rows); i++) {
        const y = TOP + (i - this.view.row) * ROW;
        if (y >= TOP - ROW) visit(this.rows[i], y);
      }
    }

    drawGrid() {
      const c = this.context, { from, to } = this.view, unit = this.data.unit;
      const wanted = ((to - from) * unit * 110) / (this.width - LEFT), size = 10 ** Math.floor(Math.log10(wanted));
      const tick = [1, 2, 5, 10].map((m) => m * size).find((m) => m >= wanted) / unit;
      c.font = "11px system-ui, sans-serif";
      for (let t = Math.ceil(from / tick) * tick; t <= to; t += tick) {
        const x = LEFT + (t - from) * this.scale;
        c.fillStyle = "#e6e9ed";
        c.fillRect(x, TOP - 4, 1, this.height);
        c.fillStyle = "#5b6470";
        c.fillText(seconds(Math.round((t * unit) / 1e-9) * 1e-9), x + 3, 14);
      }
    }

    // The first event of a lane that ends after `time`: events of a lane do not overlap.
    firstAfter(number, time) {
      let [low, high] = this.firsts[number];
      while (low < high) {
        const middle = (low + high) >> 1;
        this.end[middle] <= time ? (low = middle + 1) : (high = middle);
      }
      return low;
    }

    drawLane(number, y) {
      const c = this.context, end = this.firsts[number][1], { from, to } = this.view;
      const request = this.data.lanes[number].kind === "request";
      let filled = -1;
      for (let i = this.firstAfter(number, from); i < end && this.start[i] < to; i++) {
        if (!this.shown[i]) continue;
        const x0 = LEFT + (this.start[i] - from) * this.scale, x1 = LEFT + (this.end[i] - from) * this.scale;
        // What ends on a pixel that is painted already cannot be told from it.
        if (x1 <= filled) continue;
        // Whole pixels, or the edges of many narrow events would fade into each other.
        const left = Math.max(Math.floor(x0), filled), width = Math.max(Math.round(x1) - left, 1);
        c.fillStyle = (request && (i & 1) ? this.paler : this.colors)[this.label[i]];
        c.fillRect(left, y, width > 4 ? width - 1 : width, ROW - GAP);
        filled = left + width;
        this.painted++;
        if (width > 60) this.caption(i, left, y, width);
      }
    }

    caption(i, x, y, width) {
      const c = this.context;
      c.font = "10px system-ui, sans-serif";
      c.fillStyle = BRIGHT.has(this.colors[this.label[i]]) ? "#1b2028" : "#fff";
      const left = Math.max(x, LEFT), room = x + width - left - 8;
      const details = this.data.texts[this.text[i]], label = this.data.labels[this.label[i]];
      const text = details.startsWith("request ") ? details.slice(8) : label + (room > 170 && details ? `: ${details}` : "");
      if (room <= 30) return;
      c.save();
      c.beginPath();
      c.rect(left, y, room + 4, ROW);
      c.clip();
      c.fillText(text, left + 4, y + ROW - 5);
      c.restore();
    }

    eventAt(x, y) {
      const row = Math.floor((y - TOP) / ROW + this.view.row);
      if (x < LEFT || y < TOP || row < 0 || row >= this.rows.length) return -1;
      const number = this.rows[row], slack = 2 / this.scale;
      const time = this.view.from + (x - LEFT) / this.scale, end = this.firsts[number][1];
      for (let i = this.firstAfter(number, time - slack); i < end && this.start[i] <= time + slack; i++) {
        if (this.shown[i]) return i;
      }
      return -1;
    }

    point(event) {
      const i = this.eventAt(event.offsetX, event.offsetY), unit = this.data.unit;
      hover.hidden = i < 0;
      if (i < 0) return;
      const text = this.data.texts[this.text[i]];
      hover.textContent = `${this.data.labels[this.label[i]]} · step ${this.step[i]}\n` +
        `${seconds((this.end[i] - this.start[i]) * unit)}, from ${seconds(this.start[i] * unit)}` + (text ? `\n${text}` : "");
      hover.style.left = `${Math.min(event.clientX + 14, window.innerWidth - hover.offsetWidth - 8)}px`;
      hover.style.top = `${Math.min(event.clientY + 14, window.innerHeight - hover.offsetHeight - 8)}px`;
    }
  }

  document.querySelectorAll("[data-timeline]").forEach((section) => {
    window.report.timelines.push(new Timeline(section, window.report.data.timelines[Number(section.dataset.timeline)]));
  });
  window.report.ready = performance.now();
})();
