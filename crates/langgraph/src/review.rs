//! Answers the interrupts of a run: one question after another, until all are answered.

use serde_json::{Map, Value, json};

use crate::interrupt::{Action, Interrupt, InterruptKind};

/// A person's answer to one [`Question`].
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Approve,
    /// Use these arguments instead.
    Edit(Value),
    /// Reject the action, with a reason for the agent.
    Reject(String),
    /// Text in place of the action, or in answer to a question.
    Respond(String),
}

/// The next thing to be decided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Question<'a> {
    Action(&'a Action),
    Text(&'a str),
}

/// The interrupts of a run with the decisions so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Review {
    interrupts: Vec<Interrupt>,
    decided: Vec<Vec<Decision>>,
}

impl Review {
    /// `None` if there are no interrupts.
    pub fn of(interrupts: Vec<Interrupt>) -> Option<Self> {
        let decided = vec![Vec::new(); interrupts.len()];
        (!interrupts.is_empty()).then_some(Self { interrupts, decided })
    }

    pub fn next(&self) -> Option<Question<'_>> {
        let (interrupt, decided) = self.interrupts.iter().zip(&self.decided).find(|(i, d)| d.len() < i.kind.count())?;
        Some(match &interrupt.kind {
            InterruptKind::Review(actions) | InterruptKind::LegacyReview(actions) => Question::Action(&actions[decided.len()]),
            InterruptKind::Question(text) => Question::Text(text),
        })
    }

    /// The number of the current question, and how many there are.
    pub fn progress(&self) -> (usize, usize) {
        let decided: usize = self.decided.iter().map(Vec::len).sum();
        let all = self.interrupts.iter().map(|i| i.kind.count()).sum();
        (decided + 1, all)
    }

    /// Records the decision on [`Review::next`]. The error says why the decision isn't allowed.
    pub fn decide(&mut self, decision: Decision) -> Result<(), &'static str> {
        match (self.next(), &decision) {
            (None, _) => return Err("there is nothing to decide"),
            (Some(Question::Text(_)), Decision::Respond(_)) => {}
            (Some(Question::Text(_)), _) => return Err("this is a question: answer it with text"),
            (Some(Question::Action(action)), Decision::Edit(_)) if !action.may_edit => return Err("this may not be edited"),
            (Some(Question::Action(action)), Decision::Reject(_)) if !action.may_reject => return Err("this may not be rejected"),
            (Some(Question::Action(action)), Decision::Respond(_)) if !action.may_respond => {
                return Err("this can only be approved, edited or rejected");
            }
            (Some(Question::Action(_)), Decision::Edit(args)) if !args.is_object() => {
                return Err("the arguments must be a JSON object, such as {\"command\": \"ls\"}");
            }
            _ => {}
        }
        let open = self.interrupts.iter().zip(&mut self.decided).find(|(i, d)| d.len() < i.kind.count());
        if let Some((_, decided)) = open {
            decided.push(decision);
        }
        Ok(())
    }

    /// The value with which the run is resumed, once everything is decided.
    pub fn answer(&self) -> Option<Value> {
        if self.next().is_some() {
            return None;
        }
        let answers: Vec<Value> = self.interrupts.iter().zip(&self.decided).map(|(i, decided)| answer_to(&i.kind, decided)).collect();
        match <[Value; 1]>::try_from(answers) {
            Ok([only]) => Some(only),
            Err(answers) => {
                let named = self.interrupts.iter().zip(answers).filter_map(|(i, answer)| Some((i.id.clone()?, answer)));
                Some(Value::Object(named.collect::<Map<_, _>>()))
            }
        }
    }
}

impl InterruptKind {
    fn count(&self) -> usize {
        match self {
            InterruptKind::Review(actions) | InterruptKind::LegacyReview(actions) => actions.len(),
            InterruptKind::Question(_) => 1,
        }
    }
}

fn answer_to(kind: &InterruptKind, decided: &[Decision]) -> Value {
    match kind {
        InterruptKind::Review(actions) => {
            json!({"decisions": actions.iter().zip(decided).map(|(action, d)| decision_json(action, d)).collect::<Vec<_>>()})
        }
        InterruptKind::LegacyReview(actions) => actions.iter().zip(decided).map(|(action, d)| legacy_decision_json(action, d)).collect(),
        InterruptKind::Question(_) => match decided.first() {
            // Text that is valid JSON is sent as such, for graphs that expect a number or an object.
            Some(Decision::Respond(words)) => serde_json::from_str(words).unwrap_or_else(|_| json!(words)),
            _ => Value::Null,
        },
    }
}

fn decision_json(action: &Action, decision: &Decision) -> Value {
    match decision {
        Decision::Approve => json!({"type": "approve"}),
        Decision::Edit(args) => json!({"type": "edit", "edited_action": {"name": action.name, "args": args}}),
        Decision::Reject(why) if why.is_empty() => json!({"type": "reject"}),
        Decision::Reject(why) => json!({"type": "reject", "message": why}),
        Decision::Respond(words) => json!({"type": "respond", "message": words}),
    }
}

fn legacy_decision_json(action: &Action, decision: &Decision) -> Value {
    match decision {
        Decision::Approve => json!({"type": "accept", "args": null}),
        Decision::Edit(args) => json!({"type": "edit", "args": {"action": action.name, "args": args}}),
        Decision::Reject(_) => json!({"type": "ignore", "args": null}),
        Decision::Respond(words) => json!({"type": "response", "args": words}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(value: Value) -> Review {
        Review::of(Interrupt::read_all(&value)).unwrap()
    }

    #[test]
    fn a_run_is_resumed_once_every_action_is_decided() {
        let mut review = asked(json!([{"id": "i", "value": {"action_requests": [
            {"name": "execute", "args": {"command": "a"}}, {"name": "write_file", "args": {}}, {"name": "delete", "args": {}}]}}]));
        assert!(matches!(review.next(), Some(Question::Action(a)) if a.name == "execute"));
        assert_eq!(review.progress(), (1, 3));
        review.decide(Decision::Approve).unwrap();
        assert!(review.decide(Decision::Edit(json!("no object"))).is_err());
        review.decide(Decision::Edit(json!({"x": 1}))).unwrap();
        assert_eq!(review.answer(), None);
        review.decide(Decision::Reject("not that".into())).unwrap();
        assert_eq!(
            review.answer().unwrap(),
            json!({"decisions": [
                {"type": "approve"},
                {"type": "edit", "edited_action": {"name": "write_file", "args": {"x": 1}}},
                {"type": "reject", "message": "not that"}]})
        );
    }

    #[test]
    fn several_interrupts_are_answered_by_id() {
        let mut review = asked(json!([{"id": "a", "value": "one?"}, {"id": "b", "value": "two?"}]));
        review.decide(Decision::Respond("yes".into())).unwrap();
        assert!(review.decide(Decision::Approve).is_err());
        review.decide(Decision::Respond("{\"n\": 2}".into())).unwrap();
        assert_eq!(review.answer().unwrap(), json!({"a": "yes", "b": {"n": 2}}));
    }

    #[test]
    fn only_offered_decisions_are_accepted() {
        let mut review = asked(json!([{"value": {"action_requests": [{"name": "x", "args": {}}],
            "review_configs": [{"action_name": "x", "allowed_decisions": ["approve"]}]}}]));
        assert!(review.decide(Decision::Reject(String::new())).is_err());
        assert!(review.decide(Decision::Edit(json!({}))).is_err());
        review.decide(Decision::Approve).unwrap();
        assert!(review.decide(Decision::Approve).is_err());
    }
}
