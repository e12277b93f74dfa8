// Alerts, below the list of runs: the webhook's address, a test of it, what was not delivered; and the browser's own
// notifications, which a switch turns on in this browser and which come for as long as a page of the panel is open.
(() => {
  "use strict";
  const VF = window.VF;
  const KEPT = "vf-notify";
  const EVERY_MS = 5000; // a tab in the background is let run about once a minute

  VF.mountAlerts = (element) => {
    const root = element.querySelector(".vf-alerts");
    const button = (act, text) => VF.make("button", { class: "vf-button vf-button-small", type: "button", "data-act": act }, text);
    const field = VF.make("input", { type: "text", inputmode: "url", autocomplete: "off", spellcheck: "false", "aria-label": VF.word("alerts.webhook") });
    const save = button("save", VF.word("alerts.save"));
    const test = button("test", VF.word("alerts.test"));
    const remove = button("remove", VF.word("alerts.remove"));
    const said = VF.make("p", { class: "vf-sub", role: "status", hidden: true });
    const troubles = VF.make("ul", { class: "vf-alert-troubles", hidden: true });
    const notify = VF.make("input", { type: "checkbox" });
    const refused = VF.make("span", { class: "vf-sub", hidden: true }, VF.word("alerts.browser.refused"));
    const form = VF.make("form", { class: "vf-alert-webhook" }, VF.make("label", {}, VF.word("alerts.webhook")), field, save, test, remove);
    root.append(
      VF.make("details", { class: "vf-fold vf-panel" }, VF.make("summary", {}, VF.word("alerts.title")),
        VF.make("p", { class: "vf-sub" }, VF.word("alerts.help")), form, said,
        VF.make("label", { class: "vf-alert-browser" }, notify, VF.word("alerts.browser"), refused)),
      troubles,
    );

    // ---- the webhook ---------------------------------------------------------------------------------------------
    const draw = (view) => {
      field.placeholder = view.webhook || VF.word("alerts.webhook.none");
      VF.show(remove, !!view.webhook);
      const key = JSON.stringify(view.troubles);
      if (troubles.dataset.key === key) return;
      troubles.dataset.key = key;
      troubles.replaceChildren(...view.troubles.map((text) => VF.make("li", {}, text)));
      VF.show(troubles, view.troubles.length > 0);
    };
    const tell = (text, bad = false) => {
      VF.text(said, text);
      VF.show(said, !!text);
      said.classList.toggle("vf-bad", bad);
    };
    const ask = async (pressed, work) => {
      pressed.disabled = true;
      tell(pressed === test ? VF.word("alerts.test.busy") : "");
      try {
        await work();
      } catch (error) {
        tell(error.what ? `${error.what}. ${error.remedy ?? ""}` : VF.word("monitor.offline"), true);
      }
      pressed.disabled = false;
    };
    const set = async (address) => {
      draw(await VF.fetch("webhook", {}, "POST", { address }));
      field.value = ""; // the whole address is shown to nobody again
      tell(VF.word(address ? "alerts.saved" : "alerts.removed"));
    };
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.target === field) save.click();
    });
    save.addEventListener("click", () => (field.value.trim() ? ask(save, () => set(field.value)) : field.focus()));
    remove.addEventListener("click", () => ask(remove, () => set("")));
    test.addEventListener("click", () => ask(test, async () => {
      const answer = await VF.fetch("webhook/test", {}, "POST", { address: field.value });
      tell(answer.said, !answer.ok);
    }));

    // ---- the browser's notifications -----------------------------------------------------------------------------
    let last = null; // the number of the newest alert that is no news
    let timer = 0;
    let asking = false;
    const able = () => "Notification" in window && window.isSecureContext && Notification.permission !== "denied";
    const on = () => able() && Notification.permission === "granted" && localStorage.getItem(KEPT) === "1";
    const drawSwitch = () => {
      notify.checked = on();
      notify.disabled = !able();
      VF.show(refused, !able());
    };
    notify.addEventListener("change", async () => {
      localStorage.setItem(KEPT, notify.checked ? "1" : "0");
      if (notify.checked && Notification.permission === "default") await Notification.requestPermission();
      drawSwitch();
      last = null;
      tick();
    });
    const show = ({ id, job, title, text }) => {
      try {
        // The same tag in every tab: the browser shows one.
        const shown = new Notification(title, { body: text, tag: `vramfit-${location.host}-${id}` });
        shown.onclick = () => { window.focus(); VF.go("monitor", job); shown.close(); };
      } catch { /* phones have notifications for installed pages only */ }
    };

    // Asks while somebody looks at the list, and also in the background while notifications are on.
    const tick = async () => {
      clearTimeout(timer);
      const looks = VF.place().page === "runs" && !document.hidden;
      if ((looks || on()) && !asking) {
        asking = true;
        try {
          const view = await VF.fetch("alerts", { after: on() ? last : null });
          draw(view);
          if (on()) view.alerts.forEach(show);
          last = view.last;
        } catch { /* the list of runs says that nobody answers */ }
        asking = false;
      }
      clearTimeout(timer);
      timer = setTimeout(tick, EVERY_MS);
    };
    window.addEventListener("vf:arrive", tick);
    document.addEventListener("visibilitychange", tick);
    drawSwitch();
    tick();
  };
})();
