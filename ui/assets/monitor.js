// The Monitor page: one run, live. Asks the server about once a second for what is new since the last answer and adds it
// to the charts (Plotly.extendTraces), so nothing flickers, a zoom stays, and no history is sent twice.
(() => {
  "use strict";
  const VF = window.VF;
  const SMOOTHING = 0.2; // weight of a new point in the smoothed loss
  const FAR = 6; // a constant line this many times above the curves is not drawn at first
  const make = VF.make;

  // Fetched while gradio builds the page when this page is wanted, else once the first page stands.
  let plotlyLoading = null;
  const plotly = () => {
    plotlyLoading ??= new Promise((resolve, reject) => {
      const script = make("script", { src: VF.plotly, async: true });
      script.onload = () => resolve(window.Plotly);
      script.onerror = () => { plotlyLoading = null; reject(new Error("plotly")); };
      document.head.append(script);
    });
    return plotlyLoading;
  };
  VF.plot = async (place, data, layout) => {
    await plotly();
    if (place?.isConnected) await window.Plotly.react(place, data, layout, { displayModeBar: false, responsive: true });
  };
  if (VF.place().page === "monitor") plotly().catch(() => {});
  else setTimeout(() => plotly().catch(() => {}), 2500);

  // ---- one chart -----------------------------------------------------------------------------------------------
  class Chart {
    constructor(figure, runKey) {
      this.figure = figure;
      this.runKey = runKey;
      this.plot = make("div", { class: "vf-plot" });
      this.now = make("b");
      this.note = make("p", { class: "vf-sub", hidden: true });
      this.card = make("section", { class: "vf-chart", "data-chart": figure.key },
        make("header", {}, make("h4", {}, figure.title), this.now), this.plot, this.note);
      this.drawn = false;
    }

    colour(trace) {
      return VF.css(`--vf-line-${trace.colour}`);
    }

    // The line traces in drawing order, then the constant lines, then the evaluations.
    traces() {
      const line = (trace) => ({
        type: "scatter", mode: "lines", name: trace.name, x: [], y: [],
        opacity: trace.faint ? 0.35 : 1,
        line: { color: this.colour(trace), width: trace.faint ? 1 : 2 },
        ...(trace.stacked ? { stackgroup: "parts", fillcolor: `${this.colour(trace)}77` }
          : { fill: trace.fill ? "tozeroy" : "none", fillcolor: `${this.colour(trace)}22` }),
      });
      const flat = (entry) => ({
        type: "scatter", mode: "lines", name: entry.name, x: [], y: [],
        line: { color: VF.css(entry.style === "dot" ? "--vf-line-7" : "--vf-line-8"), width: 1.5, dash: entry.style },
      });
      const all = [...this.figure.traces.map(line), ...this.figure.lines.map(flat)];
      if (this.figure.evaluations) {
        all.push({ type: "scatter", mode: "lines+markers", name: this.figure.evaluations, x: [], y: [],
          line: { color: VF.css("--vf-line-3"), width: 1.5 }, marker: { size: 6 } });
      }
      return all;
    }

    layout() {
      const grid = VF.css("--vf-grid");
      const axis = { gridcolor: grid, zeroline: false, linecolor: grid, tickfont: { size: 11 }, automargin: true };
      const range = this.figure.log ? { type: "log", tick0: 0, dtick: Math.log10(4), tickformat: ",~g" }
        : this.figure.top != null ? { range: [0, this.figure.top] } : this.figure.floor === 0 ? { rangemode: "tozero" } : {};
      const unit = this.figure.source === "telemetry" ? VF.word("chart.minutes") : VF.word("chart.step");
      return {
        height: 212, margin: { l: 8, r: 10, t: 6, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: VF.css("--vf-font") || "system-ui", color: VF.css("--vf-muted"), size: 11 },
        xaxis: { ...axis, title: { text: unit, standoff: 4, font: { size: 11 } }, nticks: 6, tickformat: this.figure.source === "telemetry" ? "" : ",d" },
        yaxis: { ...axis, ...range, nticks: 5, exponentformat: "e", ticksuffix: this.figure.unit === "%" ? "%" : "" },
        hovermode: "x unified", hoverlabel: { bgcolor: VF.css("--vf-surface"), font: { color: VF.css("--vf-ink") } },
        showlegend: this.figure.traces.length + this.figure.lines.length > 1,
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 }, bgcolor: "rgba(0,0,0,0)" },
        dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
        uirevision: this.runKey, // keeps the reader's zoom when the data is replaced
      };
    }

    // New points as one {x, y} per trace. `state` of the smoothing lives from reset to reset.
    points(columns, start) {
      const x = this.figure.source === "telemetry" ? columns.time.map((time) => (time - start) / 60) : columns.step;
      const lines = this.figure.traces.map((trace, index) => {
        const values = columns[trace.column] ?? [];
        if (!trace.smooth) return { x, y: values.map((value) => (value == null ? null : value * trace.scale)) };
        return { x, y: values.map((value) => this.smooth(index, value)) };
      });
      return [...lines, ...this.figure.lines.map((entry) => ({ x, y: x.map(() => entry.value) }))];
    }

    // A budget far above everything measured would press the curves flat: then it is a click in the legend away.
    hideFarLines(data) {
      const count = this.figure.traces.length;
      const measured = data.slice(0, count).flatMap((trace) => trace.y).reduce((most, value) => Math.max(most, value ?? 0), 0);
      this.figure.lines.forEach((entry, index) => {
        if (measured > 0 && entry.value > FAR * measured) data[count + index].visible = "legendonly";
      });
    }

    smooth(index, value) {
      if (value == null) return this.smoothed[index] ?? null;
      const before = this.smoothed[index];
      // The first points count more, so that the curve starts where the loss does.
      this.smoothedCount += 1;
      const weight = Math.max(SMOOTHING, 1 / this.smoothedCount);
      this.smoothed[index] = before == null ? value : before + weight * (value - before);
      return this.smoothed[index];
    }

    async replace(columns, start) {
      this.smoothed = [];
      this.smoothedCount = 0;
      const data = this.traces();
      this.points(columns, start).forEach((points, index) => Object.assign(data[index], points));
      if (this.evaluations) Object.assign(data.at(-1), this.evaluations);
      this.hideFarLines(data);
      await window.Plotly.react(this.plot, data, this.layout(), {
        displaylogo: false, responsive: true, displayModeBar: false, doubleClick: "reset", showTips: false });
      this.drawn = true;
      this.data = { columns, start };
      this.showNow(columns);
    }

    async extend(columns, start) {
      if (!(columns[this.figure.source === "telemetry" ? "time" : "step"] ?? []).length) return;
      const points = this.points(columns, start);
      await window.Plotly.extendTraces(this.plot,
        { x: points.map((entry) => entry.x), y: points.map((entry) => entry.y) }, points.map((_, index) => index));
      this.showNow(columns);
    }

    async setEvaluations(found) {
      const now = { x: found.map((one) => one.step), y: found.map((one) => one.loss) };
      if (this.evaluations?.x.length === now.x.length) return;
      this.evaluations = now;
      if (this.drawn) await window.Plotly.restyle(this.plot, { x: [now.x], y: [now.y] }, [this.plot.data.length - 1]);
    }

    async recolour() {
      if (!this.drawn) return;
      const fresh = this.traces();
      const data = this.plot.data.map((trace, index) => ({ ...fresh[index], x: trace.x, y: trace.y, visible: trace.visible }));
      await window.Plotly.react(this.plot, data, this.layout());
    }

    setNote(text) {
      VF.text(this.note, text ?? "");
      VF.show(this.note, !!text);
    }

    // The newest value, beside the title.
    showNow(columns) {
      const values = columns[this.figure.now ?? this.figure.traces[0].column] ?? [];
      const last = values.findLast((value) => value != null);
      if (last == null) return;
      const value = last * this.figure.traces[0].scale;
      const unit = this.figure.unit;
      if (unit === "GiB") return VF.text(this.now, VF.bytes(last));
      const digits = unit === "%" && this.figure.top == null ? VF.number(value, 2) : unit === "%" || unit === "W" || unit === "°C" ? value.toFixed(0) : ["speed", "scale"].includes(this.figure.key) ? VF.count(value) : VF.number(value, 3);
      VF.text(this.now, `${digits}${unit && unit !== "%" ? " " : ""}${unit}`);
    }

    // A sensor that this machine does not have: no chart at all.
    get empty() {
      return this.drawn && this.plot.data.slice(0, this.figure.traces.length).every((trace) => trace.y.every((value) => value == null));
    }
  }

  // ---- the page ------------------------------------------------------------------------------------------------
  class Monitor {
    constructor(root, trigger) {
      this.trigger = trigger;
      this.build(root);
      this.forget();
      this.run = null;
      window.addEventListener("vf:arrive", () => this.arrive());
      window.addEventListener("vf:theme", () => this.charts.forEach((chart) => chart.recolour()));
      document.addEventListener("visibilitychange", () => this.tick());
      this.log.addEventListener("toggle", () => this.tick());
      this.arrive();
    }

    build(root) {
      const part = (name, tag = "div", ...children) => (this[name] = make(tag, { class: `vf-${name.toLowerCase()}` }, ...children));
      const tile = (key) => {
        const value = make("dd");
        this.tiles[key] = { value, name: make("dt") };
        return make("div", { "data-tile": key }, this.tiles[key].name, value);
      };
      this.tiles = {};
      this.badge = make("span", { class: "vf-badge" });
      this.stopButton = make("button", { class: "vf-button vf-button-stop", type: "button", "data-act": "stop" });
      this.pauseButton = make("button", { class: "vf-button", type: "button", "data-act": "pause" });
      this.resumeButton = make("button", { class: "vf-button vf-button-primary", type: "button" }, VF.word("monitor.resume"));
      this.copyButton = make("button", { class: "vf-button", type: "button", "data-act": "copy" }, VF.word("monitor.copy"));
      this.tuneButton = make("button", { class: "vf-button vf-button-primary", type: "button", "data-act": "tune" }, VF.word("monitor.finetune"));
      part("runHead", "div", part("runName", "h2"), this.badge, part("runFacts", "span"),
        make("span", { class: "vf-actions" }, this.copyButton, this.resumeButton, this.pauseButton, this.stopButton));
      this.fill = make("i");
      this.bar = make("div", { class: "vf-progress-bar", role: "progressbar" }, this.fill);
      part("progress", "div", make("div", { class: "vf-progress-line" }, part("phase", "span"), part("steps", "span")), this.bar);
      part("tileRow", "dl", ...["eta", "loss", "eval", "speed", "peak", "skipped"].map(tile));
      part("failure", "div");
      part("result", "div");
      part("grid", "div");
      part("waiting", "p"); part("note", "p"); part("offline", "p"); part("none", "p");
      this.eventList = make("ul", { class: "vf-events" });
      this.eventsEmpty = make("p", { class: "vf-sub" }, VF.word("monitor.noevents"));
      this.events = make("details", { class: "vf-fold vf-panel", open: true }, make("summary", {}, VF.word("monitor.events")), this.eventsEmpty, this.eventList);
      this.logText = make("pre", { tabindex: "0" });
      this.log = make("details", { class: "vf-fold vf-panel" }, make("summary", {}, VF.word("monitor.log")), this.logText);
      this.body = make("div", { class: "vf-monitor-body" }, this.runHead, this.progress, this.tileRow, this.failure, this.result,
        this.waiting, this.grid, this.note, this.events, this.log);
      root.append(this.offline, this.none, this.body);
      for (const hidden of [this.body, this.offline, this.none, this.failure, this.result, this.note, this.waiting]) hidden.hidden = true;
      this.stopButton.addEventListener("click", () => this.pressStop());
      this.resumeButton.addEventListener("click", () => this.act("resume"));
      this.pauseButton.addEventListener("click", () => this.pressPause());
      this.copyButton.addEventListener("click", () => this.act("copy"));
      this.tuneButton.addEventListener("click", () => this.act("tune"));
    }

    act(action) {
      this.trigger("click", { action, run: this.job.id });
      setTimeout(() => this.tick(), 300);
    }

    // Stop asks once: the first click turns into the question, which goes away by itself.
    pressStop() {
      if (this.job?.state !== "queued" && !this.confirming) {
        this.confirming = setTimeout(() => { this.confirming = 0; this.drawHead(); }, 4000);
        return this.drawHead();
      }
      clearTimeout(this.confirming);
      this.confirming = 0;
      this.stopSent = true;
      this.drawHead();
      this.act("stop");
    }

    // Pause is no loss, so it does not ask.
    pressPause() {
      this.pauseSent = true;
      this.drawHead();
      this.act("pause");
    }

    forget() {
      this.cursor = { series_after: 0, telemetry_after: 0, drift_after: 0, events_after: 0, samples_known: -1 };
      this.charts = [];
      this.figureKey = "";
      this.job = null;
      this.stopSent = this.pauseSent = false;
      this.last = {};
      this.grid.replaceChildren();
      this.eventList.replaceChildren();
      this.result.replaceChildren();
      VF.show(this.result, false);
      VF.text(this.logText, "");
    }

    arrive() {
      const { page, run } = VF.place();
      if (page !== "monitor") return;
      if (run !== this.run) {
        this.run = run;
        this.shown = 0;
        this.forget();
        VF.show(this.body, false);
      }
      plotly().catch(() => {});
      this.tick();
    }

    // One question to the server; never two at a time, and none while nobody looks.
    async tick() {
      clearTimeout(this.timer);
      if (this.busy || VF.place().page !== "monitor" || document.hidden) return;
      this.busy = true;
      const run = this.run;
      try {
        const view = await VF.fetch(`run/${run}`, { ...this.cursor, want_log: this.log.open ? 1 : 0 });
        if (run === this.run) await this.draw(view);
        VF.show(this.offline, false);
      } catch (error) {
        if (!error.what) console.debug(error);
        VF.text(this.offline, error.what ? `${error.what}. ${error.remedy ?? ""}` : VF.word("monitor.offline"));
        VF.show(this.offline, true);
      } finally {
        this.busy = false;
      }
      clearTimeout(this.timer);
      if (run !== this.run) return this.tick();
      const waiting = this.job && !this.job.final && !this.job.step;
      this.timer = setTimeout(() => this.tick(), waiting ? 400 : this.job?.final ? 3000 : 1000);
    }

    async draw(view) {
      VF.text(this.none, VF.word("monitor.none"));
      VF.show(this.none, !view.job);
      VF.show(this.body, !!view.job);
      if (!view.job) return;
      if (this.shown && this.shown !== view.job.id) { // no run was named and another one is at work now
        this.forget();
        this.shown = 0;
        return this.tick();
      }
      this.shown = view.job.id;
      this.job = view.job;
      this.now = view.time;
      this.remember(view.series);
      this.drawHead();
      this.drawProgress();
      this.drawTiles();
      this.drawFailure();
      this.drawEvents(view.events);
      this.drawSamples(view.samples);
      this.drawLog(view.log);
      await this.drawCharts(view);
      this.root?.setAttribute("data-ready", "1");
    }

    remember({ columns, last }) {
      for (const name of ["loss", "tokens_per_s", "resident_bytes", "allocated_bytes"]) {
        const value = [...(columns[name] ?? []).slice(-1), ...(last[name] ?? [])].at(-1);
        if (value != null) this.last[name] = value;
      }
    }

    drawHead() {
      const job = this.job;
      if (!job) return;
      VF.text(this.runName, job.name);
      VF.text(this.badge, VF.word(`state.${job.state}`));
      this.badge.className = `vf-badge vf-state-${job.state}`;
      VF.text(this.runFacts, [`#${job.id}`, job.model, job.method, job.device].filter(Boolean).join(" · "));
      if (!job.active) this.stopSent = this.pauseSent = false; // it ended, and may go on later
      const pausing = job.active && job.state !== "stopping" && !this.stopSent && (job.state === "pausing" || this.pauseSent);
      const stopping = job.active && !pausing && (job.state === "stopping" || this.stopSent);
      VF.show(this.stopButton, !job.final);
      VF.show(this.pauseButton, job.active && !job.foreground);
      this.pauseButton.disabled = pausing || stopping;
      VF.text(this.pauseButton, VF.word(pausing ? "state.pausing" : "monitor.pause"));
      this.stopButton.disabled = stopping;
      VF.text(this.stopButton, VF.word(stopping ? "state.stopping" : job.state === "queued" ? "runs.cancel" : this.confirming ? "monitor.stop.confirm" : "monitor.stop"));
      this.stopButton.classList.toggle("vf-confirm", !!this.confirming);
      VF.show(this.resumeButton, job.resumable);
      VF.show(this.copyButton, job.final);
    }

    drawProgress() {
      const job = this.job;
      const phase = job.phase;
      const training = job.step > 0 && (!phase || phase.name === "training");
      let line = VF.word(`state.${job.state}`);
      if (job.state === "queued") line = job.waits || VF.word("run.queued");
      else if (job.state === "pausing" || (job.active && this.pauseSent && !this.stopSent)) line = VF.word("monitor.pausing");
      else if (job.state === "stopping" || (job.active && this.stopSent)) line = VF.word("monitor.stopping");
      else if (job.active && phase) line = VF.word(`run.${phase.name}`) + (phase.detail ? `: ${phase.detail}` : "");
      if (job.active && job.heartbeat_at && this.now - job.heartbeat_at > 20) {
        line += ` · ${VF.word("monitor.quiet", { time: VF.duration(this.now - job.heartbeat_at) })}`;
      }
      VF.text(this.phase, line);
      const inPhase = job.active && phase && phase.name !== "training" && phase.total > 0;
      const share = inPhase ? phase.done / phase.total : job.state === "succeeded" ? 1 : job.total_steps ? job.step / job.total_steps : 0;
      const moving = !job.final && !inPhase && !training && job.state !== "queued";
      this.bar.classList.toggle("vf-moving", moving && share === 0);
      this.bar.dataset.state = job.state;
      this.bar.setAttribute("aria-valuenow", Math.round(share * 100));
      this.fill.style.width = `${Math.min(100, share * 100).toFixed(2)}%`;
      const steps = job.total_steps ? `${VF.word("monitor.step")} ${VF.count(job.step)} ${VF.word("monitor.of")} ${VF.count(job.total_steps)}` : "";
      VF.text(this.steps, inPhase ? `${VF.count(phase.done)} / ${VF.count(phase.total)} ${phase.unit}` : steps);
      VF.text(this.waiting, VF.word("monitor.waiting"));
      VF.show(this.waiting, !job.step && !job.final);
    }

    drawTiles() {
      const job = this.job;
      const set = (key, name, value) => { VF.text(this.tiles[key].name, name); VF.text(this.tiles[key].value, value); };
      const ran = VF.runTime(job, this.now);
      if (job.final) set("eta", VF.word("monitor.elapsed"), VF.duration(ran));
      else set("eta", VF.word("monitor.eta"), VF.duration(this.timeLeft()));
      const final = job.final && job.final_loss != null;
      set("loss", VF.word(final ? "monitor.final" : "monitor.loss"), VF.loss(final ? job.final_loss : this.last.loss));
      set("eval", VF.word("monitor.eval"), VF.loss(job.eval_loss));
      set("speed", VF.word("monitor.speed"), VF.count(this.last.tokens_per_s));
      set("peak", VF.word("monitor.peak"), VF.bytes(job.peak_allocated_bytes || this.last.allocated_bytes));
      set("skipped", VF.word("monitor.skipped"), VF.count(job.skipped_steps));
      VF.show(this.tiles.skipped.value.parentElement, job.skipped_steps > 0);
      this.tileRow.classList.toggle("vf-six", job.skipped_steps > 0);
    }

    // From the time the steps so far took: the first step's time is when training began.
    timeLeft() {
      const job = this.job;
      if (!job.step || !job.total_steps || this.firstStep == null || job.step <= this.firstStep.step) return null;
      return ((this.now - this.firstStep.time) / (job.step - this.firstStep.step)) * (job.total_steps - job.step);
    }

    drawFailure() {
      const { failure, remedy, state } = this.job;
      VF.show(this.failure, !!failure);
      if (!failure) return;
      this.failure.dataset.state = state;
      const key = `${failure}|${remedy}`;
      if (this.failure.dataset.key === key) return;
      this.failure.dataset.key = key;
      this.failure.replaceChildren(make("p", { class: "vf-notice-title" }, failure), make("p", {}, remedy ?? ""));
    }

    drawEvents(events) {
      for (const event of events) {
        const time = new Date(event.time * 1000).toLocaleTimeString(VF.language);
        const where = event.step ? `${VF.word("monitor.step")} ${event.step}` : "";
        this.eventList.prepend(make("li", { class: `vf-event-${event.level}` }, make("time", {}, time), make("span", {}, event.message), make("small", {}, where)));
        this.cursor.events_after = Math.max(this.cursor.events_after, event.id);
      }
      VF.show(this.eventsEmpty, !this.eventList.children.length);
    }

    drawLog(log) {
      if (log == null) return;
      const atEnd = this.logText.scrollHeight - this.logText.scrollTop - this.logText.clientHeight < 30;
      VF.text(this.logText, log || VF.word("monitor.nolog"));
      if (atEnd) this.logText.scrollTop = this.logText.scrollHeight;
    }

    // Before beside after, one pair a prompt.
    drawSamples(samples) {
      const job = this.job;
      if (samples) { this.samples = samples; this.cursor.samples_known = samples.length; }
      const key = `${job.id}|${this.samples?.length}|${job.final && job.export}`;
      if (this.result.dataset.key === key || !this.samples) return;
      this.result.dataset.key = key;
      const prompts = [...new Set(this.samples.map((sample) => sample.prompt))];
      const column = (sample, title) => make("div", { class: `vf-sample vf-sample-${title}` },
        make("h5", {}, title === "before" ? VF.word("monitor.before") : VF.word("monitor.after", { step: sample?.step ?? 0 })),
        make("p", {}, make("mark", {}, sample?.prompt ?? ""), ` ${sample?.text ?? ""}`));
      const pairs = prompts.map((prompt) => {
        const of = (stage) => this.samples.findLast((sample) => sample.prompt === prompt && sample.stage === stage);
        const [before, after] = [of("before"), of("after")];
        return make("div", { class: "vf-pair" }, ...(before ? [column(before, "before")] : []), ...(after ? [column(after, "after")] : []));
      });
      const parts = pairs.length ? [make("h3", {}, VF.word("monitor.samples")), ...pairs] : [];
      if (job.final && job.export) {
        parts.push(make("div", { class: "vf-export" }, make("p", {}, VF.word("monitor.export"), " ", make("code", {}, job.export)),
          make("p", { class: "vf-sub" }, VF.word("monitor.export.next")), ...(job.tunable ? [this.tuneButton] : [])));
      }
      this.result.replaceChildren(...parts);
      this.result.toggleAttribute("data-done", this.samples.some((sample) => sample.stage === "after"));
      VF.show(this.result, parts.length > 0);
    }

    fromTheStart() {
      for (const source of ["series", "telemetry", "drift"]) Object.assign(this.cursor, { [`${source}_after`]: 0, [`${source}_stride`]: null });
    }

    async drawCharts(view) {
      const { series, telemetry, drift, figures, evaluations, job } = view;
      const first = { step: series.columns.step?.[0], time: series.columns.time?.[0] };
      if (series.reset) this.firstStep = first.step == null ? null : first;
      else if (this.firstStep == null && first.step != null) this.firstStep = first;
      Object.assign(this.cursor, { series_after: series.cursor, series_stride: series.stride, revision: series.revision,
        telemetry_after: telemetry.cursor, telemetry_stride: telemetry.stride,
        drift_after: drift.cursor, drift_stride: drift.stride });
      const nothing = !job.step && !(telemetry.columns.time ?? []).length && !this.charts.length;
      VF.text(this.note, [job.has_card || !job.device ? "" : VF.word("monitor.nocard"),
        series.stride > 1 ? VF.word("monitor.thinned", { stride: series.stride }) : ""].filter(Boolean).join(" "));
      VF.show(this.note, !!this.note.textContent && !!job.step);
      if (nothing) { // keep asking for everything until there is something to draw
        this.fromTheStart();
        return;
      }
      await plotly();
      if (view.job.id !== this.job?.id) return;
      const key = JSON.stringify(figures) + job.id;
      const fresh = key !== this.figureKey;
      if (fresh && this.charts.length) { // the forecast came, or a first check: other charts. Ask again from the start.
        this.charts = [];
        this.grid.replaceChildren();
        this.figureKey = "";
        this.fromTheStart();
        return;
      }
      if (fresh) {
        this.figureKey = key;
        this.charts = figures.map((figure) => new Chart(figure, `run-${job.id}`));
        this.grid.replaceChildren(...this.charts.map((chart) => chart.card));
      }
      const start = job.started_at ?? job.created_at;
      for (const chart of this.charts) {
        const source = { telemetry, drift, series }[chart.figure.source];
        if (chart.figure.evaluations) await chart.setEvaluations(evaluations);
        chart.setNote(view.notes[chart.figure.key]);
        if (source.reset || !chart.drawn) await chart.replace(source.columns, start);
        else await chart.extend(source.columns, start);
        if (job.final) VF.show(chart.card, !chart.empty);
      }
      this.grid.dataset.points = String(this.charts[0]?.plot.data?.[0]?.x.length ?? 0);
      this.grid.dataset.lastStep = String(this.charts[0]?.plot.data?.[0]?.x.at(-1) ?? 0);
    }
  }

  VF.mountMonitor = (element, trigger) => {
    VF.monitor = new Monitor(element.querySelector(".vf-monitor"), trigger);
  };
})();
