// What every page shares: which page and run the address names, light or dark, number and time formats, and the
// small reactions of the New run page. Loaded in <head>, before anything is drawn. window.VF = {language, words, states}
// is set by the server just before.
(() => {
  "use strict";
  const VF = window.VF;
  const PAGES = ["new", "explore", "monitor", "runs"];

  VF.word = (key, values = {}) =>
    (VF.words[key] ?? key).replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);

  // ---- the address: ?view=monitor&run=3 (gradio takes `page` for itself) ------------------------------------------------------------------------
  VF.place = () => {
    const query = new URLSearchParams(location.search);
    const run = Number.parseInt(query.get("run") ?? "0", 10) || 0;
    const page = query.get("view") ?? (run ? "monitor" : "new");
    return { page: PAGES.includes(page) ? page : "new", run };
  };

  VF.go = (page, run = 0) => {
    const url = new URL(location.href);
    url.searchParams.set("view", page);
    if (run) url.searchParams.set("run", run);
    else if (page === "new") url.searchParams.delete("run");
    if (url.href !== location.href) history.pushState(null, "", url);
    arrive();
  };

  const arrive = () => {
    const { page, run } = VF.place();
    document.documentElement.dataset.page = page;
    for (const link of document.querySelectorAll(".vf-nav [data-page]")) {
      link.toggleAttribute("aria-current", link.dataset.page === page);
      if (link.dataset.page === page) link.setAttribute("aria-current", "page");
    }
    window.dispatchEvent(new CustomEvent("vf:arrive", { detail: { page, run } }));
  };
  window.addEventListener("popstate", arrive);
  document.documentElement.dataset.page = VF.place().page;

  // ---- light or dark -------------------------------------------------------------------------------------------
  // gradio follows the system by putting `dark` on <body>; a choice made here is kept in this browser.
  const chosen = () => localStorage.getItem("vf-theme");
  const applyTheme = () => {
    if (document.body && chosen()) document.body.classList.toggle("dark", chosen() === "dark");
  };
  const watchTheme = () => {
    applyTheme();
    new MutationObserver(() => {
      if (chosen() && document.body.classList.contains("dark") !== (chosen() === "dark")) applyTheme();
      else window.dispatchEvent(new CustomEvent("vf:theme"));
    }).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  };
  if (document.body) watchTheme();
  else document.addEventListener("DOMContentLoaded", watchTheme);

  VF.css = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();

  // ---- numbers and times ---------------------------------------------------------------------------------------
  VF.bytes = (size) => {
    if (size == null) return "–";
    if (size >= 2 ** 30) return `${(size / 2 ** 30).toFixed(1)} GiB`;
    if (size >= 2 ** 20) return `${(size / 2 ** 20).toFixed(0)} MiB`;
    return `${(size / 2 ** 10).toFixed(0)} KiB`;
  };
  VF.duration = (seconds) => {
    if (seconds == null || !Number.isFinite(seconds)) return "–";
    const whole = Math.round(Math.max(seconds, 0));
    const two = (number) => String(number).padStart(2, "0");
    if (whole < 60) return `${whole} s`;
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
    if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
    return `${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
  };
  VF.number = (value, digits = 3) => {
    if (value == null) return "–";
    if (value === 0) return "0";
    if (Math.abs(value) < 0.001) return value.toExponential(1);
    return Number(value).toPrecision(digits);
  };
  VF.loss = (value) => (value == null ? "–" : value.toFixed(3));
  VF.count = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));
  VF.runTime = (job, now) =>
    job.started_at == null ? null : (job.finished_at ?? now) - job.started_at;

  // ---- drawing without flicker: an element changes only when its content does ----------------------------------
  VF.text = (element, text) => {
    if (element && element.textContent !== text) element.textContent = text;
  };
  VF.show = (element, visible) => {
    if (element && element.hidden === visible) element.hidden = !visible;
  };
  VF.make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === true) element.setAttribute(name, "");
      else if (value !== false && value != null) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  };

  VF.fetch = async (path, query = {}, method = "GET", body = null) => {
    const url = new URL(`/vramfit/data/${path}`, location.origin);
    url.searchParams.set("lang", VF.language);
    for (const [name, value] of Object.entries(query)) if (value != null) url.searchParams.set(name, value);
    const answer = await fetch(url, { cache: "no-store", method, ...(body && { body: JSON.stringify(body), headers: { "content-type": "application/json" } }) });
    const values = await answer.json();
    if (values.error) throw Object.assign(new Error(values.error.what), values.error);
    if (!answer.ok) throw new Error(answer.statusText);
    return values;
  };

  // ---- header --------------------------------------------------------------------------------------------------
  VF.mountHeader = (element) => {
    element.addEventListener("click", (event) => {
      const target = event.target.closest("[data-page],[data-theme-switch],[data-language]");
      if (!target) return;
      event.preventDefault();
      if (target.dataset.page) VF.go(target.dataset.page, target.dataset.page === "new" ? 0 : VF.place().run);
      else if (target.dataset.language) location.href = `/${target.dataset.language}/${location.search}`;
      else {
        localStorage.setItem("vf-theme", document.body.classList.contains("dark") ? "light" : "dark");
        applyTheme();
      }
    });
    arrive();
  };

  // ---- New run: the estimate repeats each problem at its field, and keeps its folds open -------------------------
  VF.mountEstimate = (element, watch, trigger) => {
    const check = VF.checking(element);
    let open = new Set();
    let again = 0;
    const askAgain = () => {
      if (!element.querySelector("[data-again]")) return;
      if (document.hidden || VF.place().page !== "new") again = setTimeout(askAgain, 1000);
      else trigger("click", {});
    };
    element.addEventListener("toggle", (event) => {
      const folds = [...element.querySelectorAll("details")];
      const index = folds.indexOf(event.target);
      if (index >= 0) event.target.open ? open.add(index) : open.delete(index);
    }, true);
    VF.askEstimate = () => trigger("click", {});
    VF.markAgain = () => VF.markFields(element); // a control that tells problems was drawn anew
    const after = () => {
      element.querySelectorAll("details").forEach((fold, index) => { fold.open = open.has(index); });
      VF.markFields(element);
      check();
      clearTimeout(again);
      again = setTimeout(askAgain, 700);
      VF.estimateShownAt = performance.now();
    };
    watch("value", after);
    after();
  };

  // Check precisely: the button asks for a trace of exactly the plan in sight; answers about another one are let go.
  VF.checking = (element) => {
    let answer = null; // {token, html, figure}
    const place = () => element.querySelector("[data-token]");
    const put = () => {
      const box = place();
      if (!box || answer?.token !== box.dataset.token) return;
      box.querySelector(".vf-check-view").innerHTML = answer.html;
      box.querySelector("[data-check]").disabled = answer.state === "running" || answer.state === "done";
      if (answer.figure) VF.timeline(box.querySelector(".vf-timeline"), answer.figure);
    };
    const ask = async (token, method) => {
      let found;
      try {
        found = await VF.fetch(`check/${token}`, {}, method);
      } catch (error) {
        found = { state: "failed", html: "" };
        found.html = VF.make("p", { class: "vf-note" }, error.what ? `${error.what}. ${error.remedy ?? ""}` : VF.word("monitor.offline")).outerHTML;
      }
      if (place()?.dataset.token !== token) return;
      answer = { token, ...found };
      put();
      if (found.state === "running") setTimeout(() => place()?.dataset.token === token && ask(token, "GET"), 500);
    };
    element.addEventListener("click", (event) => {
      if (event.target.closest("[data-check]")) ask(place().dataset.token, "POST");
    });
    return () => {
      const token = place()?.dataset.token;
      if (!token) return;
      if (answer?.token !== token) { answer = null; return; }
      put();
      if (answer.state === "running") ask(token, "GET");
    };
  };

  // ---- New run: one click per goal ---------------------------------------------------------------------------------
  VF.mountPresets = (element, watch, trigger) => {
    let asked = 0;
    // Into the buttons that are there: one that goes between a press and its release takes the click with it.
    const put = (row, html) => {
      const fresh = new DOMParser().parseFromString(html, "text/html").querySelectorAll("button");
      fresh.forEach((button, index) => {
        const there = row.children[index];
        if (!there) return row.append(button);
        for (const name of ["disabled", "title", "data-goal"]) {
          button.hasAttribute(name) ? there.setAttribute(name, button.getAttribute(name)) : there.removeAttribute(name);
        }
        there.innerHTML = button.innerHTML;
      });
    };
    const ask = async () => {
      const row = element.querySelector(".vf-presets");
      const mine = ++asked;
      try {
        const { html } = await VF.fetch("presets", { card: row.dataset.card });
        if (mine === asked && row.isConnected) put(row, html);
      } catch { /* the estimate says what is wrong with a card */ }
    };
    element.addEventListener("click", (event) => {
      const button = event.target.closest("[data-goal]");
      if (button) trigger("submit", { goal: button.dataset.goal });
    });
    VF.askPresets = ask;
    watch("value", ask);
    ask();
  };

  // ---- New run: the data card asks until it is whole, shows any row, and tells the estimate of measured lengths -------
  VF.mountData = (element, watch, trigger) => {
    let again = 0;
    let measured = "";
    let shown = null; // the row in sight: {key, number, html, title}
    let asked = 0;
    const askAgain = () => {
      if (!element.querySelector("[data-again]")) return;
      if (document.hidden || VF.place().page !== "new") again = setTimeout(askAgain, 1000);
      else trigger("click", {});
    };
    const place = () => element.querySelector(".vf-examples");
    const keyOf = ({ token, limit, how }) => `${token} ${limit} ${how}`;
    const put = () => {
      const box = place();
      if (!box || !shown) return;
      box.querySelector(".vf-row-view").innerHTML = shown.html;
      VF.text(box.querySelector(".vf-row-title"), shown.title);
      const field = box.querySelector("[data-row]");
      field.value = shown.number;
      const [back, on] = box.querySelectorAll("[data-turn]");
      back.disabled = shown.number <= 1;
      on.disabled = field.max !== "" && shown.number >= Number(field.max);
      box.dataset.shown = shown.number;
    };
    // `find`: "" for the row of that number itself; else what is looked for from there on.
    const show = async (number, find = "") => {
      const box = place();
      if (!box) return;
      const key = keyOf(box.dataset);
      const mine = ++asked;
      box.classList.add("vf-row-waits");
      try {
        const { token, limit, how } = box.dataset;
        const row = await VF.fetch(`row/${token}`, { number, limit: limit || null, how, find: find || null });
        if (mine !== asked || !place() || keyOf(place().dataset) !== key) return;
        if (row.note) VF.text(place().querySelector(".vf-row-title"), row.note);
        else {
          shown = { key, ...row };
          put();
        }
      } catch (error) {
        if (mine !== asked || !place()) return;
        VF.text(place().querySelector(".vf-row-title"), error.message);
      } finally {
        if (mine === asked) place()?.classList.remove("vf-row-waits");
      }
    };
    const wanted = (field) => {
      const number = Math.max(Math.round(Number(field.value)) || 1, 1);
      return field.max === "" ? number : Math.min(number, Number(field.max));
    };
    element.addEventListener("click", (event) => {
      const button = event.target.closest("[data-turn],[data-find]");
      if (!button) return;
      const field = place().querySelector("[data-row]");
      const now = shown?.number ?? 1;
      if (button.dataset.turn) show(now + Number(button.dataset.turn));
      else if (button.dataset.find === "random") show(1 + Math.floor(Math.random() * (Number(field.max) || now)));
      else show(now, button.dataset.find);
    });
    element.addEventListener("change", (event) => {
      event.stopPropagation();
      if (event.target.matches("[data-row]")) show(wanted(event.target));
      const { set, on, off } = event.target.dataset;
      if (set) trigger("submit", { field: set, value: event.target.checked ? on : off });
    });
    const after = () => {
      const now = element.querySelector(".vf-data")?.dataset.measured ?? "";
      if (now && now !== measured) VF.askEstimate?.();
      measured = now;
      const box = place();
      if (box) {
        if (shown?.key === keyOf(box.dataset)) put();
        else show(shown && shown.key.startsWith(`${box.dataset.token} `) ? shown.number : 1);
      }
      VF.markAgain?.();
      clearTimeout(again);
      again = setTimeout(askAgain, 120);
    };
    watch("value", after);
    after();
  };

  // ---- New run: which column is which. What is chosen is handed to the form when its button is pressed ---------------
  VF.mountColumns = (element, watch, trigger) => {
    const shown = () => element.querySelector("[data-for]:not([hidden])");
    const check = () => {
      const button = element.querySelector("[data-use]");
      if (button) button.disabled = [...shown().querySelectorAll("[data-needed]")].some((part) => !part.value);
    };
    element.addEventListener("change", (event) => {
      event.stopPropagation();
      if (event.target.matches("[data-kind]")) {
        for (const parts of element.querySelectorAll("[data-for]")) parts.hidden = parts.dataset.for !== event.target.value;
      }
      check();
    });
    element.addEventListener("click", (event) => {
      const button = event.target.closest("[data-use],[data-forget]");
      if (!button) return;
      const chosen = [...shown().querySelectorAll("[data-part]")].filter((part) => part.value);
      const value = Object.fromEntries(chosen.map((part) => [part.dataset.part, part.value]));
      trigger("submit", { field: "data.columns", value: "forget" in button.dataset ? {} : value });
    });
    watch("value", () => {
      check();
      VF.markAgain?.();
    });
  };

  // New run: the form holds the settings of a waiting run; its button lets go of it.
  VF.mountEditing = (element, trigger) => {
    element.addEventListener("click", (event) => {
      if (event.target.closest("[data-leave]")) trigger("click", {});
    });
  };

  VF.markFields = (element) => {
    for (const note of document.querySelectorAll(".vf-field-problem")) note.remove();
    for (const field of document.querySelectorAll(".vf-wrong")) field.classList.remove("vf-wrong");
    for (const item of element.querySelectorAll(".vf-problem-item")) {
      const field = document.getElementById(VF.fieldId(item.dataset.field));
      if (!field) continue;
      field.classList.add("vf-wrong");
      field.append(VF.make("div", { class: "vf-field-problem", role: "alert" }, item.textContent));
    }
  };
  // Where a field's problem is told: at the control in sight that sets it.
  const INSTEAD = { "data.columns": "field-columns", "data.most_dropped_share": "field-agree" };
  VF.fieldId = (path) => {
    if (path === "data.paths" && !visible("field-data-paths")) return "field-data-choice";
    if (INSTEAD[path] && visible(INSTEAD[path])) return INSTEAD[path];
    return `field-${path.replaceAll(".", "-")}`;
  };
  const visible = (id) => document.getElementById(id)?.offsetParent != null;

  // The answer to a pressed button: a run to open, a file to save, or a card to read.
  VF.mountAnswer = (element, watch) => {
    watch("value", () => {
      const run = element.querySelector("[data-open]");
      if (run) VF.go("monitor", Number(run.dataset.open));
      const file = element.querySelector("[data-download]");
      if (file) save(file.dataset.download, file.dataset.text);
      const page = element.querySelector("[data-go]");
      if (page) VF.go(page.dataset.go);
      if (element.querySelector(".vf-notice")) element.scrollIntoView({ block: "nearest", behavior: "smooth" });
    });
  };
  const save = (name, text) => {
    const link = VF.make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/yaml" })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
})();
